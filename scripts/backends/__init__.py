"""What a run computes on and what carries its exchange: CPU cores or GPUs, transports, --strategy auto."""
