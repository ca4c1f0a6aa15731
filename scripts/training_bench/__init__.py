"""Contenders and table of bench_training.py: whole training steps of this project and of PyTorch."""
