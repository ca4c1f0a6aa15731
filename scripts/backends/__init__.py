"""The choice of CPU cores or GPUs, of the transport between GPUs, and of the strategy (--strategy auto)."""
