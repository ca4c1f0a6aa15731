"""The parts of watch.py: the current state of a run folder, and one screen that shows it."""
