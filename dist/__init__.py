"""Processes and wires: who the ranks are and where they sit. Knows no GPT-2.

world.py      ranks, nodes, local ranks; one line for a user's mistake on any rank
abort.py      an exception on one rank ends the job on all
cores.py      how many threads a rank may run
ranges.py     cutting a flat buffer into the parts ranks own
clock.py      every node's clock against rank 0's
launcher.py   the mpirun command of this machine
"""
