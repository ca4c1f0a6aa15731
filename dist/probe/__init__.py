"""What the machine is, measured or asked.

links.py      the network between the nodes, memory inside them, their clocks
ports.py      bytes through a node's network ports, by the kernel's counters
programs.py   the mpirun that starts ranks here, which MPI a text tells of, and what any tool prints in limited time
"""
