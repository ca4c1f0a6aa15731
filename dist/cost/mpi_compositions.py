"""Collectives put together from others, node by node: MPICH's SMP-aware ones, Open MPI's HAN.

Inside a node the libraries have algorithms of their own. Here a binomial tree stands for them: it carries nothing over
a port, and its time comes from a measured rate (model.Cluster.local_rate).
"""

from dataclasses import replace

import numpy as np

from dist.cost import mpi_algorithms
from dist.cost.mpi_calls import MpiCall
from dist.cost.rabenseifner import rabenseifner_reduce
from dist.cost.stages import Stage, backwards, doublings, stage


def local_reduce(call: MpiCall) -> list[Stage]:
    """Every node's sum on its leader."""
    place, leader = call.group.local_places
    by_place = np.argsort(leader * call.count + place)  # node by node, each node's members in their order
    stages = []
    for distance in doublings(int(place.max()) + 1):
        senders = np.flatnonzero(place[by_place] % (2 * distance) == distance)
        source, destination = call.members[by_place[senders]], call.members[by_place[senders - distance]]
        stages.append(stage(source, destination, call.size, added=call.size))
    return stages


def local_bcast(call: MpiCall) -> list[Stage]:
    """From every leader to its node."""
    return backwards(local_reduce(call))


def smp(call: MpiCall, resolve) -> tuple[list[Stage], list[str]]:
    """MPICH's: inside the nodes, among their leaders, inside the nodes again.

    resolve(call): (stages, names) of the leaders' call, which is a choice of its own.
    """
    root, root_leader = call.members[call.root], call.group.leaders.members[call.root_node]
    if call.collective in ("bcast", "ibcast"):
        middle, names = resolve(call.among_leaders(call.root_node))
        return [stage(root, root_leader, call.size), *middle, *local_bcast(call)], names
    if call.collective == "ireduce":
        middle, names = resolve(call.among_leaders(call.root_node))
        return [*local_reduce(call), *middle, stage(root_leader, root, call.size)], names
    middle, names = resolve(replace(call.among_leaders(), after_node_sums=True))
    # Whatever the root, the leaders reduce to rank 0's node, and the vector goes on from there: the counters show it.
    after = local_bcast(call) if call.collective == "allreduce" else [stage(call.members[0], root, call.size)]
    return local_reduce(call) + middle + after, names


def han(call: MpiCall) -> list[Stage]:
    """Open MPI's HAN: segments of 64 KiB, so that node sum, leaders' exchange and node broadcast run at once.

    Among the leaders it calls libnbc. Its algorithms were counted with 3, 4 and 5 leaders; more are taken to be served
    like 5.
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
    # One stage of all messages: what a pipeline of small segments comes to.
    joined = [np.concatenate([getattr(part, name) for part in parts]) for name in ("source", "destination", "size")]
    return [stage(*joined, steps=sum(part.steps for part in parts), all_together=True)]


def _han_all_gather(call: MpiCall) -> list[Stage]:
    """Blocks collected on the leaders, gathered among them, and handed to everybody on the node."""
    leaders = call.among_leaders()
    _, leader = call.group.local_places
    collect = stage(call.members, call.members[leader], call.block)
    if leaders.power_of_two:
        middle = mpi_algorithms.doubling_all_gather(leaders.members, leaders.blocks, leaders.library)
    else:
        middle = mpi_algorithms.bruck_all_gather(leaders)
    return [collect, *middle, *local_bcast(call)]
