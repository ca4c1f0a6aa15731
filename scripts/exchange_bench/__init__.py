"""The exchanges that bench_exchange.py measures and --strategy auto tries."""
