"""The parts of train.py's loop. plan.py makes all decisions, assemble.py makes the parts.

evaluation.py belongs to evaluate.py, which sums a model's losses over ranks like a validation.
"""
