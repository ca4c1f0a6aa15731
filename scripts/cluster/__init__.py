"""Hosts made of Linux namespaces, and a SLURM on them: the parts of virtual_cluster.py and virtual_slurm.py.

program.py        what both programs share: their command line, what they need, how they end
hosts.py          a host: one process in namespaces of its own, and all that ends with it
network.py        the switch between the hosts, and the rate of each port
launch.py         mpirun across the hosts
slurm_config.py   SLURM's configuration files      slurm_daemons.py  its daemons, started and ended
"""
