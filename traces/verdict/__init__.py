"""What holds a run's steps up: evidence, rules, the diagnosis."""
