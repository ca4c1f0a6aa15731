"""What is read from a run's traces: its files checked, seconds by phase, waits, traffic."""
