"""Rabenseifner's reduce and allreduce: recursive halving, then a gather, or halving backwards.

Members beyond a power of two are folded into a neighbour first. MPICH folds whole vectors
(src/mpi/coll/reduce/reduce_intra_reduce_scatter_gather.c, allreduce_intra_reduce_scatter_allgather.c); Open MPI lets
the two of a pair add half of it each, and collects the halves (ompi/mca/coll/base/coll_base_reduce.c,
coll_base_allreduce.c, libnbc/nbc_ireduce.c). Either way the folded one gets an allreduce's result at the end.
"""

import numpy as np

from dist.cost.mpi_algorithms import RENDEZVOUS_BYTES, folded
from dist.cost.stages import Stage, stage


def rabenseifner_reduce(members, size, item, root=0, library="mpich", after_node_sums=False) -> list[Stage]:
    """To the root. item: bytes of one element, which no block cuts; after_node_sums: as mpi_calls.Call says."""
    core, fold = folded(members, keep=0)
    apart = pairs_apart(library, size, len(fold) > 0, in_step=0 if after_node_sums else 1)
    stages, first, edges = halving(core, size, item, apart)
    stages = fold_stages(fold, size, item, library) + stages
    target = members[root]
    if target not in core:  # the first of all hands its block to the root, which takes its place
        stages.append(stage(core[0], target, edges[1]))
        core = np.concatenate([[target], core[1:]])
    return stages + binomial_gather(core, int(np.flatnonzero(core == target)[0]), first, edges)


def rabenseifner_allreduce(members, size, item, library="mpich") -> list[Stage]:
    """To everybody."""
    core, fold = folded(members, keep=0 if library == "openmpi" else 1)
    stages, *_ = halving(core, size, item, pairs_apart(library, size, len(fold) > 0))
    apart_again = pairs_apart(library, size, len(fold) > 0, gathering=True)
    gather = [
        stage(one.destination, one.source, one.size, exchange_apart=apart_again(0, one.size.max(initial=0)))
        for one in reversed(stages)
    ]
    unfold = [stage(fold[:, 1], fold[:, 0], size)] if len(fold) else []
    return fold_stages(fold, size, item, library) + stages + gather + unfold


def pairs_apart(library, size, fold, gathering=False, in_step=1):
    """A function (exchange's number, bytes each way) -> whether pairs come to that exchange out of step.

    As measured. A vector that is sent at once holds nobody up. Else, with Open MPI, always. With MPICH a fold holds up
    half of the pairs, until they have waited for each other in halving. Without one the first `in_step` exchanges are
    in step; then the pairs get apart by adding, in halving only where a message is so large that it waits.
    """
    if size < RENDEZVOUS_BYTES[library]:
        return lambda number, sent: False
    if library == "openmpi":
        return lambda number, sent: True
    if fold or gathering:
        return lambda number, sent: fold != gathering
    return lambda number, sent: number >= in_step and bool(sent >= RENDEZVOUS_BYTES[library])


def fold_stages(fold, size, item, library) -> list[Stage]:
    """Vectors of the members folded away, added to their partners'. fold: (K, 2), see mpi_algorithms.folded."""
    if not len(fold):
        return []
    if library == "mpich":
        return [stage(fold[:, 0], fold[:, 1], size, added=size)]
    half = size // item // 2 * item
    apart = size >= RENDEZVOUS_BYTES[library]
    halves = np.tile([half, size - half], len(fold))
    both_ways = stage(fold.ravel(), fold[:, ::-1].ravel(), halves, added=size - half, exchange_apart=apart)
    return [both_ways, stage(fold[:, 0], fold[:, 1], size - half)]


def halving(core, size, item, apart) -> tuple[list[Stage], np.ndarray, np.ndarray]:
    """Reduce-scatter of a power of two of members, neighbours first, half of what is left each time.

    Returns the stages, the block each member ends with (its index with the bits reversed), and the blocks' edges in
    bytes, (len(core)+1,). apart: as pairs_apart returns it.
    """
    count, index = len(core), np.arange(len(core))
    elements = size // item
    edges = item * (index * (elements // count) + np.minimum(index, elements % count))
    edges = np.append(edges, size)
    first, left, stages, distance = np.zeros(count, np.int64), count, [], 1
    while distance < count:
        left //= 2
        upper = (index // distance) % 2
        given = first + (1 - upper) * left
        first = first + upper * left
        sent = edges[given + left] - edges[given]
        out_of_step = apart(len(stages), sent.max(initial=0))
        stages.append(
            stage(core, core[index ^ distance], sent, added=int(sent.max(initial=0)), exchange_apart=out_of_step)
        )
        distance *= 2
    return stages, first, edges


def binomial_gather(core, root, first, edges) -> list[Stage]:
    """Halving's blocks to the root: its partner of the last exchange first, with twice as much each time."""
    stages, distance, blocks = [], len(core) // 2, 1
    start, active = first.copy(), np.arange(len(core))
    while distance:
        leaves = (active & distance) != (root & distance)
        senders, active = active[leaves], active[~leaves]
        sent = edges[start[senders] + blocks] - edges[start[senders]]
        stages.append(stage(core[senders], core[senders ^ distance], sent))
        start[active] = np.minimum(start[active], start[active ^ distance])
        distance, blocks = distance // 2, blocks * 2
    return stages
