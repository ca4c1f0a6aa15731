"""The parts of virtual_cluster.py and virtual_slurm.py: hosts made of Linux namespaces, and a SLURM on them."""
