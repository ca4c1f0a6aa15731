"""Whole systems: virtual hosts, SLURM, failures, damaged files; and the programs that provoke faults."""
