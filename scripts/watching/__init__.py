"""The parts of watch.py: read the current state of a run folder, and show it on one screen."""
