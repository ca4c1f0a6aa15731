"""What train.py's loop is made of: worker, checkpoints, run folder, traces, signals, what is printed.

Validation and samples too, and with them what evaluate.py sums over ranks.
"""
