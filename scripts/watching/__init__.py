"""What watch.py shows of a run that trains: the run folder as it is now, and one screen of it."""
