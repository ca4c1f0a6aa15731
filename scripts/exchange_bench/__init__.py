"""What bench_exchange.py and check_model.py time, and --strategy auto tries: contenders, rounds, tables."""
