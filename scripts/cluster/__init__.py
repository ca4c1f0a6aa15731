"""Hosts made of Linux namespaces, and a SLURM on them: the parts of virtual_cluster.py and virtual_slurm.py."""
