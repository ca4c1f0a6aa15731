"""What slows a run's steps: evidence, rules, the diagnosis."""
