"""Measure the machine, or ask it for its properties.

links.py      the network between the nodes (streams.py), and the nodes' clocks
ports.py      bytes through a node's network ports, from the kernel's counters
programs.py   the mpirun that starts ranks here, the MPI family that a text names, and the output of any tool
"""
