"""The algorithms behind the MPI libraries' collectives, as stages of messages (message_stages.py).

Each function takes the member ranks in their order in the communicator, int64 (count,), the bytes of the whole vector,
and, where there is one, the root as an index into the members. Costs in the literature's terms: Thakur, Rabenseifner
and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19(1), 2005. Which library picks
which of them when: mpi_choices.py.
"""

import numpy as np

from dist.cost.stages import Stage, stage

# UCX sends a vector of less than this at once, into buffers of the receiver; a larger one waits until the receiver
# answers. Seen over TCP at 400 Mbit/s: a Send to a rank that slept came back at once up to 3 MB, not from 4 MB, under
# MPICH 5.0.2, and waited from 128 KB under Open MPI 5.0.11.
RENDEZVOUS_BYTES = {"mpich": 3_500_000, "openmpi": 100_000}
MOST_ROUNDS = 64


def ring_reduce_scatter(members, blocks) -> list[Stage]:
    """Member r sends every block but its own, the last to arrive there summed. blocks: bytes of each member's.

    In segments, so that a segment is added while the next one comes.
    """
    sent = blocks.sum() - blocks
    steps = max(len(members) - 1, 1)
    return [stage(members, np.roll(members, -1), sent, steps=steps, added_meanwhile=int(sent.max()), all_together=True)]


def ring_all_gather(members, blocks) -> list[Stage]:
    """Member r passes on every block but that of its right neighbour, in segments."""
    sent = blocks.sum() - np.roll(blocks, -1)
    return [stage(members, np.roll(members, -1), sent, steps=max(len(members) - 1, 1), all_together=True)]


def ring_rounds(members, blocks) -> list[Stage]:
    """The all-gather as the libraries do it: in each round everybody passes on the block that came in the one before.

    Of more than MOST_ROUNDS rounds, which are alike, one stage stands for all.
    """
    count = len(members)
    if count > MOST_ROUNDS:
        return ring_all_gather(members, blocks)
    place = np.arange(count)
    return [stage(members, np.roll(members, -1), blocks[(place - shift) % count]) for shift in range(count - 1)]


def linear_reduce(members, size, root=0) -> list[Stage]:
    """Open MPI's: the root receives from one after another, the last first (coll_base_reduce.c, basic_linear)."""
    others = np.delete(members, root)[::-1]
    return [stage(other, members[root], size, added=size) for other in others]


def linear_bcast(members, size, root=0) -> list[Stage]:
    return [stage(members[root], members, size)]


def chain_reduce(members, size, root=0) -> list[Stage]:
    """One after another, from the last to the root, not cut into segments."""
    order = np.roll(members, -root)
    return [stage(order[place], order[place - 1], size, added=size) for place in range(len(order) - 1, 0, -1)]


def chain_bcast(members, size, root=0) -> list[Stage]:
    order = np.roll(members, -root)
    return [stage(order[place - 1], order[place], size) for place in range(1, len(order))]


def binomial_reduce(members, size, root=0) -> list[Stage]:
    """log2 rounds; in round k the members at odd multiples of 2^k from the root send everything and leave."""
    order, stages, distance = np.roll(members, -root), [], 1
    while distance < len(order):
        senders = np.arange(distance, len(order), 2 * distance)
        stages.append(stage(order[senders], order[senders - distance], size, added=size))
        distance *= 2
    return stages


def binomial_bcast(members, size, root=0) -> list[Stage]:
    """binomial_reduce backwards: the farthest first."""
    return [stage(one.destination, one.source, one.size) for one in reversed(binomial_reduce(members, size, root))]


def doubling_bcast(members, size, root=0) -> list[Stage]:
    """The binomial tree grown the other way: in round k the 2^k members that have it send it 2^k further."""
    order, stages, distance = np.roll(members, -root), [], 1
    while distance < len(order):
        receivers = np.arange(distance, min(2 * distance, len(order)))
        stages.append(stage(order[receivers - distance], order[receivers], size))
        distance *= 2
    return stages


def linear_scatter(members, size, root=0) -> list[Stage]:
    """One blocking send after another, in the order of the members (coll_base_scatter.c, basic_linear)."""
    return [stage(members[root], other, size // len(members)) for other in np.delete(members, root)]


def scatter_ring_bcast(members, size, root=0) -> list[Stage]:
    """van de Geijn's: blocks scattered down a binomial tree, then gathered on a ring."""
    order = np.roll(members, -root)
    return binomial_scatter(order, size) + ring_rounds(order, scattered_blocks(len(order), size))


def scatter_doubling_bcast(members, size, root=0) -> list[Stage]:
    """The same with the blocks gathered by recursive doubling, for a power of two of members."""
    order = np.roll(members, -root)
    return binomial_scatter(order, size) + doubling_all_gather(order, scattered_blocks(len(order), size))


def scattered_blocks(count: int, size: int) -> np.ndarray:
    """Bytes of each member's block: all as large as the first, until nothing is left."""
    block = -(-size // count)
    return np.clip(size - block * np.arange(count), 0, block)


def binomial_scatter(order, size) -> list[Stage]:
    """From the first member; whoever receives for others passes on their half, the farthest first.

    A stage is one distance: the sends of a rank follow one another, in sending too where each waits for its receiver.
    """
    edges = np.concatenate([[0], np.cumsum(scattered_blocks(len(order), size))])
    receivers = np.arange(1, len(order))
    distance = receivers & -receivers
    sent = edges[np.minimum(receivers + distance, len(order))] - edges[receivers]
    together = [distance == one for one in np.unique(distance)[::-1]]
    return [stage(order[receivers[now] - distance[now]], order[receivers[now]], sent[now]) for now in together]


def pairwise_reduce_scatter(members, nodes, size) -> list[Stage]:
    """In round i member r sends r+i its block. nodes: where the members sit, to tell rounds apart that matter.

    With many ranks placed node by node, the rounds of which no message stays inside a node are alike, and stand as
    one stage. Half way round the pairs exchange; the others send one way and receive from the other.
    """
    count, block = len(members), size // len(members)
    widest = int(np.bincount(nodes).max())
    alike = bool(np.all(np.diff(nodes) >= 0)) and count > max(2 * widest, 64)
    shifts = [*range(1, widest + 1), *range(count - widest + 1, count)] if alike else range(1, count)
    repeats = {widest: count - 2 * widest + 1} if alike else {}
    stages = []
    for shift in shifts:
        exchange = 2 * shift == count and block >= RENDEZVOUS_BYTES["mpich"]
        repeat = repeats.get(shift, 1)
        messages = members, np.roll(members, -shift), block
        stages.append(stage(*messages, added=block, exchange_apart=exchange, repeat=repeat))
    return stages


def doubling_all_gather(members, blocks, library="mpich") -> list[Stage]:
    """Pairs at growing distance exchange what they have; for a power of two of members. blocks: bytes of each one's."""
    edges = np.concatenate([[0], np.cumsum(blocks)])
    index, stages, distance = np.arange(len(members)), [], 1
    while distance < len(members):
        first = index - index % distance
        sent = edges[first + distance] - edges[first]
        apart = bool(sent.max() >= RENDEZVOUS_BYTES[library])
        stages.append(stage(members, members[index ^ distance], sent, exchange_apart=apart))
        distance *= 2
    return stages


def bruck_all_gather(members, size) -> list[Stage]:
    """In round k everybody sends what it has 2^k members back, the last round only what is missing."""
    block, stages, distance = size // len(members), [], 1
    while distance < len(members):
        sent = block * min(distance, len(members) - distance)
        stages.append(stage(members, np.roll(members, distance), sent))
        distance *= 2
    return stages


def doubling_allreduce(members, size) -> list[Stage]:
    """Recursive doubling of whole vectors; members beyond a power of two are folded into others and served last."""
    core, fold = folded(members, keep=1)
    index, distance = np.arange(len(core)), 1
    stages = [stage(fold[:, 0], fold[:, 1], size, added=size)] if len(fold) else []
    while distance < len(core):
        stages.append(stage(core, core[index ^ distance], size, added=size, exchange_apart=len(fold) > 0))
        distance *= 2
    return stages + ([stage(fold[:, 1], fold[:, 0], size)] if len(fold) else [])


def folded(members, keep) -> tuple[np.ndarray, np.ndarray]:
    """(a power of two of members, pairs (folded away, its partner) (K, 2)) of the first 2 K members.

    keep: which of each pair of neighbours stays, the first (0) or the second (1).
    """
    rest = len(members) - (1 << (len(members).bit_length() - 1))
    pairs = members[: 2 * rest].reshape(rest, 2)
    core = np.concatenate([pairs[:, keep], members[2 * rest :]])
    return core, np.stack([pairs[:, 1 - keep], pairs[:, keep]], axis=1)
