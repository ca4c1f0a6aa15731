"""What bench_step.py measures: contenders in processes of their own, floors, tables."""
