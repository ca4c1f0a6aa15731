"""All-reduce over two binary trees of the same ranks: each reduces half of the vector and broadcasts the sum.

In one binary tree half of the ranks are leaves and forward nothing; every interior rank combines data of two children.
A second tree swaps leaves and interior ranks, so all send and receive equally (Sanders, Speck and Träff, "Two-tree
algorithms for full bandwidth broadcast, reduction and scan", Parallel Computing 35, 2009; NCCL's double binary tree).

A rank that is interior in one tree sends and receives at most 2 D bytes. The critical path is about 2 log2(N) messages,
not the ring's 2 (N-1): for many ranks and small vectors. Segments are pipelined, so all levels work at once.
"""

from collections import deque

import numpy as np

from dist.ranges import cut_range


def allreduce(comm, flat, start, stop, wire, tags):
    """Return generators that, started in this order, replace flat[start:stop], of the wire's dtype, by the sum.

    The additions have the same order in every run. tags: two, for this exchange only; the same on all ranks.
    """
    exchanges = []
    for parents, half, tag in zip(double_tree(comm.size), cut_range(start, stop, 2), tags, strict=True):
        parent = parents[comm.rank]
        children = children_of(comm.rank, parents)
        pieces = wire.segments(*half)
        partial_sends = []
        exchanges.append(_up(comm, flat, pieces, parent, children, wire, tag, partial_sends))
        if parent is not None:
            exchanges.append(_down(comm, flat, pieces, parent, children, wire, tag, partial_sends))
    return exchanges


def _up(comm, flat, pieces, parent, children, wire, tag, partial_sends):
    """Add the children's values to each piece and send it to the parent; the root sends final sums to children."""
    incoming = [_incoming(comm, child, tag, pieces, wire) for child in children]
    final_sends = []
    # zip advances the generators of all children before the first wait, so all their receives are posted.
    for piece, *arriving in zip(pieces, *incoming, strict=True):
        for request, buffer in arriving:
            yield request
            flat[slice(*piece)] += wire.unpacked(buffer)
        if parent is not None:
            partial_sends.append(comm.Isend(wire.packed(flat, *piece), parent, tag))
        elif children:
            wire.rounded(flat, *piece)
            final_sends += [comm.Isend(wire.gathered(flat, *piece), child, tag) for child in children]
    yield from final_sends


def _down(comm, flat, pieces, parent, children, wire, tag, partial_sends):
    """Receive each final piece from the parent, and send it on."""
    incoming = _incoming(comm, parent, tag, pieces, wire)
    sends = []
    for index, (piece, (request, buffer)) in enumerate(zip(pieces, incoming, strict=True)):
        yield request
        yield partial_sends[index]  # sent from this memory; complete by now, since the final sum contains it
        final = wire.gathered(flat, *piece)
        final[:] = buffer
        sends += [comm.Isend(final, child, tag) for child in children]
        wire.arrived(flat, *piece)
    yield from sends


def _incoming(comm, source, tag, pieces, wire):
    """Yield (request, buffer) of each piece that one rank sends, with receives posted ahead.

    A buffer is valid until the next pair is requested.
    """
    longest = max(high - low for low, high in pieces)
    landing = [np.empty(longest, wire.dtype) for _ in range(min(wire.receives_ahead, len(pieces)))]
    posted = deque()
    for index in range(len(pieces) + len(landing)):
        if index >= len(landing):
            yield posted.popleft()
        if index < len(pieces):
            low, high = pieces[index]
            buffer = landing[index % len(landing)][: high - low]
            posted.append((comm.Irecv(buffer, source, tag), buffer))


def double_tree(size: int) -> tuple[list[int | None], list[int | None]]:
    """Return (parents in tree A, parents in tree B) of ranks 0 .. size-1; None for a tree's root.

    In each tree a rank has at most two children and is at most ceil(log2(size)) edges below the root. Every rank is
    interior (has children) in one tree and a leaf in the other; only rank 0 of an odd size has one child in each. So no
    rank has more than two children in all.
    """
    parents = [_in_order_parent(rank, size) for rank in range(size)]
    if size % 2:  # in tree B, rank r + 1 takes the place of rank r in tree A
        shifted = [parents[rank - 1] for rank in range(size)]
        return parents, [None if parent is None else (parent + 1) % size for parent in shifted]
    mirrored = reversed(parents)  # in tree B, rank r takes the place of rank size-1-r in tree A
    return parents, [None if parent is None else size - 1 - parent for parent in mirrored]


def children_of(rank: int, parents: list[int | None]) -> list[int]:
    return [child for child, above in enumerate(parents) if above == rank]


def _in_order_parent(rank: int, size: int) -> int | None:
    """Return a rank's parent in the tree whose leaves are the odd ranks and whose root is rank 0.

    The position of a rank's lowest set bit is its height; its parent is one level higher. If that parent does not
    exist, clearing the bit gives the nearest ancestor that does.
    """
    if rank == 0:
        return None
    lowest = rank & -rank
    parent = (rank ^ lowest) | (lowest << 1)
    return parent if parent < size else rank ^ lowest
