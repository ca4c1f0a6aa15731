"""PyTorch's contenders and the table of bench_training.py."""
