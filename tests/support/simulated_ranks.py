"""Ranks whose vectors are moved by the algorithms' messages, to count bytes and to see that every sum is whole.

Written from the algorithms' descriptions, not from dist/: recursively and message by message.
"""

from itertools import pairwise

import numpy as np

from dist.host.host_tree import double_tree


def depth(parents, rank):
    """Edges up to the root; a circle would never end, so count no further than there are ranks."""
    edges = 0
    while parents[rank] is not None:
        rank, edges = parents[rank], edges + 1
        assert edges < len(parents)
    return edges


class Ranks:
    """Every rank's vector, as the set of ranks whose values each element holds, and the bytes that went in and out."""

    def __init__(self, placement, elements, item=4):
        self.placement, self.item, self.count = placement, item, len(placement)
        self.held = [np.full(elements, 1 << rank, np.int64) for rank in range(self.count)]
        self.into, self.out = np.zeros(self.count, np.int64), np.zeros(self.count, np.int64)

    def send(self, *messages):
        """(source, destination, start, stop, add) all at once: contents are those from before any of them."""
        contents = [self.held[source][start:stop].copy() for source, _, start, stop, _ in messages]
        for (source, destination, start, stop, add), content in zip(messages, contents, strict=True):
            target = self.held[destination][start:stop]
            if add:
                assert not (target & content).any(), "a value is added twice"
                content = content | target
            self.held[destination][start:stop] = content
            if source != destination:
                self.out[source] += self.item * (stop - start)
                self.into[destination] += self.item * (stop - start)

    def share_memory(self, add):
        """What costs no message: each node's leader sums its node's vectors, or its node takes its vector."""
        for node in set(self.placement):
            first, *others = (rank for rank in range(self.count) if self.placement[rank] == node)
            for rank in others:
                if add:
                    assert not (self.held[first] & self.held[rank]).any()
                    self.held[first] |= self.held[rank]
                else:
                    self.held[rank][:] = self.held[first]

    def complete(self, rank):
        return (self.held[rank] == (1 << self.count) - 1).all()


def edges(elements, parts):
    return [elements * part // parts for part in range(parts + 1)]


def run_ring(ranks, members, elements, reduce=True, gathers=1):
    count, cuts = len(members), edges(elements, len(members))
    for half, add in [(0, True)] * reduce + [(1, False)] * gathers:
        for step in range(count - 1):
            messages = []
            for place, member in enumerate(members):
                chunk = (place - 1 - step + half) % count
                messages.append((member, members[(place + 1) % count], cuts[chunk], cuts[chunk + 1], add))
            ranks.send(*messages)


def run_tree(ranks, elements):
    half = elements // 2
    for parents, (start, stop) in zip(double_tree(ranks.count), ((0, half), (half, elements)), strict=True):
        by_depth = sorted((r for r in range(ranks.count) if parents[r] is not None), key=lambda r: -depth(parents, r))
        for rank in by_depth:
            ranks.send((rank, parents[rank], start, stop, True))
        for rank in reversed(by_depth):
            ranks.send((parents[rank], rank, start, stop, False))


def leaders_of(placement):
    return sorted({node: rank for rank, node in reversed(list(enumerate(placement)))}.values())


def run_leaders(ranks, elements):
    ranks.share_memory(add=True)
    run_ring(ranks, leaders_of(ranks.placement), elements)
    ranks.share_memory(add=False)


MATRIX, LOW_RANK = (20, 25), 4


def run_factors(ranks, elements):
    """A ring for one factor and what is sent exactly, one for the other, if the vector is longer than that matrix."""
    whole, (rows, columns) = ranks.held, MATRIX
    exact = elements - rows * columns
    sizes = [exact + LOW_RANK * rows, LOW_RANK * columns] if exact > 0 else [elements]
    for size in sizes:
        ranks.held = [held[:size].copy() for held in whole]
        run_ring(ranks, range(ranks.count), size)
        assert all(ranks.complete(rank) for rank in range(ranks.count))


RUNS = {
    "ring": lambda ranks, elements: run_ring(ranks, range(ranks.count), elements),
    "tree": run_tree,
    "hierarchical": run_leaders,
    "hierarchical-sharded": run_leaders,
    "zero-2": lambda ranks, elements: run_ring(ranks, range(ranks.count), elements),
    "zero-3": lambda ranks, elements: run_ring(ranks, range(ranks.count), elements, gathers=2),
    "powersgd": run_factors,
}


def run_fold(ranks, members, elements, keep, halves):
    """The first 2K members in pairs, one of which gives its vector to the other; the power of two that goes on."""
    rest = len(members) - (1 << (len(members).bit_length() - 1))
    going_on = list(members[2 * rest :])
    for pair in reversed(range(rest)):
        kept, gone = members[2 * pair + keep], members[2 * pair + 1 - keep]
        middle = elements // 2 if halves else elements
        ranks.send((gone, kept, 0, middle, True), (kept, gone, middle, elements, True))
        if halves:
            ranks.send((gone, kept, middle, elements, False))
        going_on.insert(0, kept)
    return going_on


def run_halving(ranks, group, blocks, first, last, owned):
    """Neighbours exchange halves of blocks [first, last); then the evens and the odds go on by themselves."""
    if len(group) == 1:
        owned[group[0]] = (first, last)
        return
    middle = (first + last) // 2
    for even, odd in zip(group[::2], group[1::2], strict=True):
        ranks.send((even, odd, blocks[middle], blocks[last], True), (odd, even, blocks[first], blocks[middle], True))
    run_halving(ranks, group[::2], blocks, first, middle, owned)
    run_halving(ranks, group[1::2], blocks, middle, last, owned)


def run_gather(ranks, group, blocks, owned, root):
    """The last exchange first: of each pair the one that is not on the root's side sends all it has."""
    distance = len(group) // 2
    active = list(range(len(group)))
    while distance:
        for place in [place for place in active if (place & distance) != (root & distance)]:
            active.remove(place)
            giver, taker = group[place], group[place ^ distance]
            ranks.send((giver, taker, blocks[owned[giver][0]], blocks[owned[giver][1]], False))
            owned[taker] = min(owned[taker][0], owned[giver][0]), max(owned[taker][1], owned[giver][1])
        distance //= 2


def uneven_blocks(elements, count):
    """The first ones larger by one, as MPICH cuts."""
    return [part * (elements // count) + min(part, elements % count) for part in range(count + 1)]


def run_rabenseifner_reduce(ranks, members, elements, root, halves=False):
    group = run_fold(ranks, members, elements, 0, halves)
    blocks, owned = uneven_blocks(elements, len(group)), {}
    run_halving(ranks, group, blocks, 0, len(group), owned)
    if members[root] not in group:
        ranks.send((group[0], members[root], blocks[0], blocks[1], False))
        group, owned[members[root]] = [members[root], *group[1:]], (0, 1)
    run_gather(ranks, group, blocks, owned, group.index(members[root]))


def run_rabenseifner_allreduce(ranks, members, elements, halves=False):
    group = run_fold(ranks, members, elements, 0 if halves else 1, halves)
    blocks, owned = uneven_blocks(elements, len(group)), {}
    run_halving(ranks, group, blocks, 0, len(group), owned)
    distance = len(group) // 2
    while distance:
        pairs = [(place, place ^ distance) for place in range(len(group))]
        had = dict(owned)
        ranks.send(*((group[a], group[b], *(blocks[edge] for edge in had[group[a]]), False) for a, b in pairs))
        for a, b in pairs:
            spans = had[group[a]], had[group[b]]
            owned[group[b]] = min(spans)[0], max(spans)[1]
        distance //= 2
    for place in range(0, 2 * (len(members) - len(group)), 2):
        pair = members[place], members[place + 1]
        kept, gone = pair if halves else pair[::-1]
        ranks.send((kept, gone, 0, elements, False))


def run_binomial_bcast(ranks, members, elements, root):
    count, distance = len(members), 1
    while distance < count:
        distance *= 2
    while distance := distance // 2:
        for place in range(0, count - distance, 2 * distance):
            source, destination = (members[(root + p) % count] for p in (place, place + distance))
            ranks.send((source, destination, 0, elements, False))


def run_scatter(ranks, order, cuts):
    """From the first of them, in blocks with these edges; whoever gets others' blocks passes them on."""

    def scatter(first, last):
        """order[first] has the blocks of order[first:last]."""
        if last - first > 1:
            middle = first + (1 << ((last - first - 1).bit_length() - 1))
            ranks.send((order[first], order[middle], cuts[middle], cuts[last], False))
            scatter(middle, last)
            scatter(first, middle)

    scatter(0, len(order))


def run_scatter_bcast(ranks, members, size, root):
    """MPICH's: then a ring, or recursive doubling for a power of two of ranks and up to half a megabyte."""
    count = len(members)
    block = -(-size // count)
    cuts = [min(part * block, size) for part in range(count + 1)]
    order = [members[(root + place) % count] for place in range(count)]
    run_scatter(ranks, order, cuts)
    if size <= 524288 and count & (count - 1) == 0:
        distance = 1
        while distance < count:
            firsts = [place // distance * distance for place in range(count)]
            spans = [(cuts[first], cuts[first + distance]) for first in firsts]
            ranks.send(*((order[p], order[p ^ distance], *spans[p], False) for p in range(count)))
            distance *= 2
        return
    for step in range(count - 1):
        chunks = [(place - step) % count for place in range(count)]
        ranks.send(
            *((order[p], order[(p + 1) % count], cuts[chunks[p]], cuts[chunks[p] + 1], False) for p in range(count))
        )


def run_mpich_reduce_bcast(ranks, elements):
    """One rank a node: below 8 ranks Bcast is binomial."""
    run_rabenseifner_reduce(ranks, list(range(ranks.count)), elements, 0)
    run_mpich_bcast(ranks, elements, 0)


def run_mpich_bcast(ranks, elements, root):
    """MPICH cuts what it broadcasts in bytes, not in elements."""
    run = run_binomial_bcast if ranks.count < 8 else run_scatter_bcast
    bytewise = Ranks(ranks.placement, elements * ranks.item, item=1)
    for rank, held in enumerate(ranks.held):
        bytewise.held[rank] = np.repeat(held, ranks.item)
    run(bytewise, list(range(ranks.count)), elements * ranks.item, root)
    for rank, held in enumerate(bytewise.held):
        ranks.held[rank][:] = held[:: ranks.item]
    ranks.into += bytewise.into
    ranks.out += bytewise.out


def run_mpich_sliced(ranks, elements, piece_bytes=1 << 40):
    """A Reduce and a Bcast for each piece of each rank's slice."""
    cuts = edges(elements, ranks.count)
    pieces = -(-max(np.diff(cuts)) * ranks.item // piece_bytes)
    for root in range(ranks.count):
        inner = [cuts[root] + cut for cut in edges(cuts[root + 1] - cuts[root], pieces)]
        for start, stop in pairwise(inner):
            whole, ranks.held = ranks.held, [held[start:stop] for held in ranks.held]
            run_rabenseifner_reduce(ranks, list(range(ranks.count)), stop - start, root)
            assert ranks.complete(root)
            run_mpich_bcast(ranks, stop - start, root)
            ranks.held = whole


def run_pairwise_ring(ranks, elements):
    """Reduce_scatter_block and Allgather. elements: a multiple of the ranks."""
    block = elements // ranks.count
    sums = [held.copy() for held in ranks.held]
    for shift in range(1, ranks.count):
        messages = []
        for rank in range(ranks.count):
            to = (rank + shift) % ranks.count
            messages.append((rank, to, to * block, (to + 1) * block))
        for source, to, start, stop in messages:
            ranks.out[source] += 4 * (stop - start)
            ranks.into[to] += 4 * (stop - start)
            sums[to][start:stop] |= ranks.held[source][start:stop]
    ranks.held = sums
    for step in range(ranks.count - 1):
        ranks.send(
            *(
                (
                    r,
                    (r + 1) % ranks.count,
                    (r - step) % ranks.count * block,
                    ((r - step) % ranks.count + 1) * block,
                    False,
                )
                for r in range(ranks.count)
            )
        )


MPICH_RUNS = {
    "reduce-bcast": run_mpich_reduce_bcast,
    "sliced-in-turn": run_mpich_sliced,
    "sliced": lambda ranks, elements: run_mpich_sliced(ranks, elements, 240_000),
    "allreduce": lambda ranks, elements: run_rabenseifner_allreduce(ranks, list(range(ranks.count)), elements),
    "reduce-scatter": run_pairwise_ring,
}
