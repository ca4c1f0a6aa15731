"""Rabenseifner's reduce and allreduce: recursive halving, then a gather to the root, or halving in reverse.

Members beyond a power of two are folded into a neighbour first. MPICH folds whole vectors
(src/mpi/coll/reduce/reduce_intra_reduce_scatter_gather.c, allreduce_intra_reduce_scatter_allgather.c). Open MPI lets
each of the two add one half of the vector, and collects the halves (ompi/mca/coll/base/coll_base_reduce.c,
coll_base_allreduce.c, libnbc/nbc_ireduce.c). After an allreduce, a folded member gets the result from its partner.
"""

from collections.abc import Callable

import numpy as np

from dist.cost.mpi_algorithms import RENDEZVOUS_BYTES, folded
from dist.cost.mpi_calls import MpiCall
from dist.cost.stages import Stage, doublings, stage


def rabenseifner_reduce(call: MpiCall) -> list[Stage]:
    """Reduce to the root: recursive halving, then a binomial gather."""
    core, fold = folded(call.members, keep=0)
    out_of_step = pairs_apart(call, len(fold) > 0, in_step=0 if call.after_node_sums else 1)
    stages, first, edges = halving(core, call, out_of_step)
    stages = fold_stages(fold, call) + stages
    target = call.members[call.root]
    if target not in core:  # the first core member hands its block to the root, which takes its place
        stages.append(stage(core[0], target, edges[1]))
        core = np.concatenate([[target], core[1:]])
    return stages + binomial_gather(core, int(np.flatnonzero(core == target)[0]), first, edges)


def rabenseifner_allreduce(call: MpiCall) -> list[Stage]:
    """Sum on all members: recursive halving, then the same exchanges in reverse order."""
    core, fold = folded(call.members, keep=0 if call.library == "openmpi" else 1)
    stages, *_ = halving(core, call, pairs_apart(call, len(fold) > 0))
    out_of_step = pairs_apart(call, len(fold) > 0, gathering=True)
    gather = [
        stage(one.destination, one.source, one.size, exchange_apart=out_of_step(0, one.size.max(initial=0)))
        for one in reversed(stages)
    ]
    unfold = [stage(fold[:, 1], fold[:, 0], call.size)] if len(fold) else []
    return fold_stages(fold, call) + stages + gather + unfold


def pairs_apart(call: MpiCall, fold: bool, gathering: bool = False, in_step: int = 1) -> Callable[[int, int], bool]:
    """Return a function (number of the exchange, bytes each way) -> whether a pair begins it at different times.

    The rules come from measurements:
    - A vector that is sent at once delays nobody.
    - Otherwise, under Open MPI, pairs are always out of step.
    - Under MPICH a fold delays half of the pairs, until they have waited for each other in halving.
    - Without a fold the first `in_step` exchanges are in step. Then adding drives the pairs apart, but only in halving,
      and only where a message is so large that it waits for its receiver.
    """
    threshold = RENDEZVOUS_BYTES[call.library]
    if call.size < threshold:
        return lambda number, sent: False
    if call.library == "openmpi":
        return lambda number, sent: True
    if fold or gathering:
        return lambda number, sent: fold != gathering
    return lambda number, sent: number >= in_step and bool(sent >= threshold)


def fold_stages(fold: np.ndarray, call: MpiCall) -> list[Stage]:
    """Add the vectors of the folded members to their partners'. fold: (K, 2), see mpi_algorithms.folded."""
    size = call.size
    if not len(fold):
        return []
    if call.library == "mpich":
        return [stage(fold[:, 0], fold[:, 1], size, added=size)]
    half = size // call.item // 2 * call.item
    apart = size >= RENDEZVOUS_BYTES[call.library]
    halves = np.tile([half, size - half], len(fold))
    both_ways = stage(fold.ravel(), fold[:, ::-1].ravel(), halves, added=size - half, exchange_apart=apart)
    return [both_ways, stage(fold[:, 0], fold[:, 1], size - half)]


def halving(core, call: MpiCall, out_of_step) -> tuple[list[Stage], np.ndarray, np.ndarray]:
    """Reduce-scatter among a power of two of members, neighbours first, half of the rest each time.

    Returns the stages, the block each member ends with (its index with the bits reversed), and the blocks' edges in
    bytes, (len(core)+1,). No edge cuts an element. out_of_step: made by pairs_apart.
    """
    count, index = len(core), np.arange(len(core))
    elements = call.size // call.item
    edges = call.item * (index * (elements // count) + np.minimum(index, elements % count))
    edges = np.append(edges, call.size)
    first, left, stages = np.zeros(count, np.int64), count, []
    for distance in doublings(count):
        left //= 2
        upper = (index // distance) % 2
        given = first + (1 - upper) * left
        first = first + upper * left
        sent = edges[given + left] - edges[given]
        most = int(sent.max(initial=0))
        apart = out_of_step(len(stages), most)
        stages.append(stage(core, core[index ^ distance], sent, added=most, exchange_apart=apart))
    return stages, first, edges


def binomial_gather(core, root, first, edges) -> list[Stage]:
    """Gather halving's blocks on the root: partners of the last exchange first, twice as much each time."""
    stages, start, active = [], first.copy(), np.arange(len(core))
    for distance in reversed(doublings(len(core))):
        leaves = (active & distance) != (root & distance)
        senders, active = active[leaves], active[~leaves]
        sent = edges[start[senders] + len(core) // (2 * distance)] - edges[start[senders]]
        stages.append(stage(core[senders], core[senders ^ distance], sent))
        start[active] = np.minimum(start[active], start[active ^ distance])
    return stages
