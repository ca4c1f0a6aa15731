"""The parts of train.py's loop. assemble.py makes them from the settings; each other file holds one subject.

evaluation.py belongs to evaluate.py, which sums a model's losses over ranks as a validation does.
"""
