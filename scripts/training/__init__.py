"""The parts of train.py's loop. plan.py decides what the run does, assemble.py makes the parts.

evaluation.py belongs to evaluate.py, which sums a model's losses over ranks as a validation does.
"""
