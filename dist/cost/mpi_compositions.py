"""Collectives composed of others, node by node: MPICH's SMP-aware ones, Open MPI's HAN.

Inside a node the libraries have algorithms of their own. Here a binomial tree stands for them: it sends nothing over a
port, and its time comes from a measured rate (model.Cluster.local_rate).
"""

from dataclasses import replace

import numpy as np

from dist.cost import mpi_algorithms
from dist.cost.mpi_calls import MpiCall
from dist.cost.rabenseifner import rabenseifner_reduce
from dist.cost.stages import Stage, backwards, doublings, stage


def local_reduce(call: MpiCall) -> list[Stage]:
    """Sum each node's vectors on its leader."""
    place, leader = call.group.local_places
    by_place = np.argsort(leader * call.count + place)  # sorted by node, in the members' order within each
    stages = []
    for distance in doublings(int(place.max()) + 1):
        senders = np.flatnonzero(place[by_place] % (2 * distance) == distance)
        source, destination = call.members[by_place[senders]], call.members[by_place[senders - distance]]
        stages.append(stage(source, destination, call.size, added=call.size))
    return stages


def local_bcast(call: MpiCall) -> list[Stage]:
    """Broadcast from each leader to its node."""
    return backwards(local_reduce(call))


def smp(call: MpiCall, resolve) -> tuple[list[Stage], list[str]]:
    """Make MPICH's SMP-aware collective: inside the nodes, among their leaders, inside the nodes again.

    resolve(call): (stages, names) of the leaders' call, for which the library chooses separately.
    """
    root, root_leader = call.members[call.root], call.group.leaders.members[call.root_node]
    if call.collective in ("bcast", "ibcast"):
        middle, names = resolve(call.among_leaders(call.root_node))
        return [stage(root, root_leader, call.size), *middle, *local_bcast(call)], names
    if call.collective == "ireduce":
        middle, names = resolve(call.among_leaders(call.root_node))
        return [*local_reduce(call), *middle, stage(root_leader, root, call.size)], names
    middle, names = resolve(replace(call.among_leaders(), after_node_sums=True))
    # The counters show that the leaders reduce to rank 0's node for any root, and that the vector goes on from there.
    after = local_bcast(call) if call.collective == "allreduce" else [stage(call.members[0], root, call.size)]
    return local_reduce(call) + middle + after, names


def han(call: MpiCall) -> list[Stage]:
    """Make Open MPI's HAN: segments of 64 KiB, so that node sum, leaders' exchange and node broadcast overlap.

    Among the leaders it calls libnbc. Its algorithms were counted with 3, 4 and 5 leaders; more are assumed to use
    those of 5.
    """
    if call.collective == "allgather":
        return _han_all_gather(call)
    leaders = call.among_leaders(call.root_node)
    parts = []
    if call.collective in ("reduce", "allreduce"):
        parts += rabenseifner_reduce(leaders)
    if call.collective in ("bcast", "allreduce"):
        bcast = mpi_algorithms.linear_bcast if leaders.count <= 4 else mpi_algorithms.doubling_bcast
        parts += bcast(leaders)
    # One stage of all messages stands for a pipeline of small segments.
    joined = [np.concatenate([getattr(part, name) for part in parts]) for name in ("source", "destination", "size")]
    return [stage(*joined, steps=sum(part.steps for part in parts), all_together=True)]


def _han_all_gather(call: MpiCall) -> list[Stage]:
    """Collect blocks on the leaders, gather them among the leaders, and broadcast them in each node."""
    leaders = call.among_leaders()
    _, leader = call.group.local_places
    collect = stage(call.members, call.members[leader], call.block)
    if leaders.power_of_two:
        middle = mpi_algorithms.doubling_all_gather(leaders.members, leaders.blocks, leaders.library)
    else:
        middle = mpi_algorithms.bruck_all_gather(leaders)
    return [collect, *middle, *local_bcast(call)]
