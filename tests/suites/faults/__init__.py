"""What failure_suite.py, fault_suite.py and random_kills.py share: cases, launchers, what a run has left."""
