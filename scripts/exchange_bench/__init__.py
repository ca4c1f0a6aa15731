"""What bench_exchange.py times, and --strategy auto tries: contenders, rounds, tables."""
