"""The parts of doctor.py. A subject's file holds the facts that each rank gathers and the checks of these facts."""
