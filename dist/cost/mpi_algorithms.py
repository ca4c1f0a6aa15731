"""The algorithms behind the MPI libraries' collectives, as stages of messages (stages.py).

Most functions take the call (mpi_calls.py). Those that are parts of several algorithms take the member ranks in their
order, int64 (count,), and the bytes of each member's block, (count,). mpi_choices.py says which library picks which
algorithm when. The algorithms and their costs: Thakur, Rabenseifner and Gropp, "Optimization of collective
communication operations in MPICH", IJHPCA 19(1), 2005.
"""

import numpy as np

from dist.cost.mpi_calls import MpiCall
from dist.cost.stages import Stage, doublings, stage

# UCX sends a smaller vector at once, into buffers of the receiver. A larger one waits until the receiver answers.
# Measured over TCP at 400 Mbit/s: a Send to a sleeping rank returned at once up to 3 MB under MPICH 5.0.2 and waited
# from 4 MB on; under Open MPI 5.0.11 it waited from 128 KB on.
RENDEZVOUS_BYTES = {"mpich": 3_500_000, "openmpi": 100_000}
MOST_ROUNDS = 64  # of a ring that are modelled one by one


def ring_reduce_scatter(members, blocks) -> list[Stage]:
    """Reduce-scatter around a ring: each member sends every block but its own, which arrives last, as the sum of all.

    Blocks travel in segments, so a member adds a segment while the next one arrives.
    """
    sent = blocks.sum() - blocks
    steps = max(len(members) - 1, 1)
    return [stage(members, np.roll(members, -1), sent, steps=steps, added_meanwhile=int(sent.max()), all_together=True)]


def ring_all_gather(members, blocks) -> list[Stage]:
    """Gather around a ring: each member passes on every block but its right neighbour's, in segments."""
    sent = blocks.sum() - np.roll(blocks, -1)
    return [stage(members, np.roll(members, -1), sent, steps=max(len(members) - 1, 1), all_together=True)]


def ring_rounds(members, blocks) -> list[Stage]:
    """Gather around a ring as the libraries do: each round, every member passes on the block it received last.

    The rounds are alike: beyond MOST_ROUNDS, one stage stands for all.
    """
    count = len(members)
    if count > MOST_ROUNDS:
        return ring_all_gather(members, blocks)
    place = np.arange(count)
    return [stage(members, np.roll(members, -1), blocks[(place - shift) % count]) for shift in range(count - 1)]


def linear_reduce(call: MpiCall) -> list[Stage]:
    """Reduce as Open MPI does: the last member sends first (coll_base_reduce.c, basic_linear)."""
    others = np.delete(call.members, call.root)[::-1]
    return [stage(other, call.members[call.root], call.size, added=call.size) for other in others]


def linear_bcast(call: MpiCall) -> list[Stage]:
    return [stage(call.members[call.root], call.members, call.size)]


def linear_scatter(call: MpiCall) -> list[Stage]:
    """Send one block after another, in the order of the members (coll_base_scatter.c, basic_linear)."""
    others = np.delete(call.members, call.root)
    return [stage(call.members[call.root], other, call.block) for other in others]


def chain_reduce(call: MpiCall) -> list[Stage]:
    """Reduce along the chain from the last member to the root, without segments."""
    order = call.from_root
    return [stage(order[place], order[place - 1], call.size, added=call.size) for place in range(call.count - 1, 0, -1)]


def binomial_reduce(call: MpiCall) -> list[Stage]:
    """Reduce in log2 rounds; in round k the members at odd multiples of 2^k from the root send all and leave."""
    order, stages = call.from_root, []
    for distance in doublings(call.count):
        senders = np.arange(distance, call.count, 2 * distance)
        stages.append(stage(order[senders], order[senders - distance], call.size, added=call.size))
    return stages


def doubling_bcast(call: MpiCall) -> list[Stage]:
    """Broadcast by libnbc's binomial tree: in round k the 2^k members that have the vector send it 2^k further.

    The root and the first member change places, the others keep theirs (nbc_ibcast.c).
    """
    order, stages = call.members.copy(), []
    order[[0, call.root]] = order[[call.root, 0]]
    for distance in doublings(call.count):
        receivers = np.arange(distance, min(2 * distance, call.count))
        stages.append(stage(order[receivers - distance], order[receivers], call.size))
    return stages


def scattered_bcast(call: MpiCall, gather) -> list[Stage]:
    """Broadcast as van de Geijn: scatter blocks down a binomial tree, then gather them.

    gather(members, blocks): ring_rounds, or doubling_all_gather for a power of two of members.
    """
    order, block = call.from_root, -(-call.size // call.count)
    blocks = np.clip(call.size - block * np.arange(call.count), 0, block)  # equal blocks, until the vector ends
    return binomial_scatter(order, blocks) + gather(order, blocks)


def binomial_scatter(order, blocks) -> list[Stage]:
    """Scatter from the first member: a sender passes on half of its blocks at a time, the farthest half first.

    A stage is one distance, because a rank sends to one receiver after another.
    """
    edges = np.concatenate([[0], np.cumsum(blocks)])
    receivers = np.arange(1, len(order))
    distance = receivers & -receivers
    sent = edges[np.minimum(receivers + distance, len(order))] - edges[receivers]
    together = [distance == one for one in np.unique(distance)[::-1]]
    return [stage(order[receivers[now] - distance[now]], order[receivers[now]], sent[now]) for now in together]


def pairwise_reduce_scatter(call: MpiCall) -> list[Stage]:
    """Reduce-scatter pairwise: in round i each member sends a block to the i-th member after it.

    Where many ranks are placed node by node, the rounds in which no message stays inside a node are alike. One repeated
    stage stands for them. Half way round, two members exchange with each other; in all other rounds a member sends to
    one and receives from another.
    """
    members, count = call.members, call.count
    widest = int(call.group.ranks_per_node.max())
    alike = bool(np.all(np.diff(call.group.nodes) >= 0)) and count > max(2 * widest, 64)
    shifts = [*range(1, widest + 1), *range(count - widest + 1, count)] if alike else range(1, count)
    repeats = {widest: count - 2 * widest + 1} if alike else {}
    stages = []
    for shift in shifts:
        apart = 2 * shift == count and call.block >= RENDEZVOUS_BYTES[call.library]
        messages, repeat = (members, np.roll(members, -shift), call.block), repeats.get(shift, 1)
        stages.append(stage(*messages, added=call.block, exchange_apart=apart, repeat=repeat))
    return stages


def doubling_all_gather(members, blocks, library="mpich") -> list[Stage]:
    """Gather in pairs at growing distance that exchange all their blocks; for a power of two of members."""
    edges = np.concatenate([[0], np.cumsum(blocks)])
    index, stages = np.arange(len(members)), []
    for distance in doublings(len(members)):
        first = index - index % distance
        sent = edges[first + distance] - edges[first]
        apart = bool(sent.max() >= RENDEZVOUS_BYTES[library])
        stages.append(stage(members, members[index ^ distance], sent, exchange_apart=apart))
    return stages


def bruck_all_gather(call: MpiCall) -> list[Stage]:
    """Gather by Bruck: in round k all send their blocks 2^k members back, in the last round only the missing ones."""
    return [
        stage(call.members, np.roll(call.members, distance), call.block * min(distance, call.count - distance))
        for distance in doublings(call.count)
    ]


def doubling_allreduce(call: MpiCall) -> list[Stage]:
    """Sum by recursive doubling of whole vectors. Members beyond a power of two are folded, and served last."""
    size, (core, fold) = call.size, folded(call.members, keep=1)
    index, apart = np.arange(len(core)), len(fold) > 0
    before = [stage(fold[:, 0], fold[:, 1], size, added=size)] if len(fold) else []
    after = [stage(fold[:, 1], fold[:, 0], size)] if len(fold) else []
    pairs = [core[index ^ distance] for distance in doublings(len(core))]
    return [*before, *(stage(core, other, size, added=size, exchange_apart=apart) for other in pairs), *after]


def folded(members, keep) -> tuple[np.ndarray, np.ndarray]:
    """Return (the members that stay, a power of two; pairs of (folded member, its partner), (K, 2)).

    The first 2 K members are pairs of neighbours. keep: which of a pair stays, the first (0) or the second (1).
    """
    rest = len(members) - (1 << (len(members).bit_length() - 1))
    pairs = members[: 2 * rest].reshape(rest, 2)
    core = np.concatenate([pairs[:, keep], members[2 * rest :]])
    return core, np.stack([pairs[:, 1 - keep], pairs[:, keep]], axis=1)
