"""What bench_training.py measures: whole training steps, ours and PyTorch's, and the table of both."""
