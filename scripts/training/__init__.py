"""The parts of train.py's loop: plan.py makes all decisions, assemble.py builds the parts.

evaluation.py belongs to evaluate.py, which sums a model's losses over all ranks as validation does.
"""
