"""Contenders and table of bench_training.py: whole training steps, ours and PyTorch's."""
