"""The ring: reduce-scatter and all-gather in N-1 steps each, both directions of every port busy (Patarasuk, Yuan 2009).

The vector is cut into one chunk a rank. In the reduce-scatter chunk r starts at rank r+1 and travels the ring to rank
r, each rank adding its own part on the way; in the all-gather it travels on and everyone keeps a copy. A rank sends to
the next and receives from the one before, all the time, (N-1)/N of the vector in each half: no schedule moves less.

Chunks travel in segments, passed on as they come, so that the network waits neither for an addition nor for a step's
end. Sends are posted as soon as their data is final; receives are posted ahead. Written as generators (progress.py).
"""

from collections import deque

import numpy as np

from dist.ranges import cut_range


def nothing(start: int, stop: int) -> None:
    """Do nothing halfway."""


def allreduce(comm, flat, addends, start, stop, wire, tag, summed=nothing):
    """Generator: flat[start:stop], float32, becomes the sum over the ranks of comm of flat and their `addends`.

    addends: more vectors of this rank's node to be added to its own (hierarchical), or none. Each sum is made once, in
    the same order in every run: the same bits on every rank. All ranks give the same range and tag. summed(start, stop)
    is called halfway: `own_chunk` is the sum, and on its way to the others.
    """
    sends = yield from _reduce_scatter(comm, flat, addends, start, stop, wire, tag)
    yield from all_gather(comm, flat, start, stop, wire, tag, sends, summed)


def reduce_scatter(comm, flat, addends, start, stop, wire, tag):
    """Generator: the part of flat[start:stop] that a rank owns (`own_chunk`) becomes the sum; the rest is spoiled."""
    sends = yield from _reduce_scatter(comm, flat, addends, start, stop, wire, tag)
    yield from sends


def _reduce_scatter(comm, flat, addends, start, stop, wire, tag):
    """Returns the sends that may not have ended yet, in the order in which all_gather needs their memory."""
    size, rank = comm.size, comm.rank
    chunks = [wire.segments(*chunk) for chunk in cut_range(start, stop, size)]
    arriving = [segment for step in range(size - 1) for segment in chunks[(rank - 2 - step) % size]]
    longest = max((high - low for low, high in arriving), default=0)
    landing = [np.empty(longest, wire.dtype) for _ in range(min(wire.receives_ahead, len(arriving)))]
    sends = []

    def send(segment):
        sends.append(comm.Isend(wire.packed(flat, *segment), (rank + 1) % size, tag))

    def take(index, segment, received):
        _add(flat, segment, addends, wire.unpacked(received))
        if index < len(arriving) - len(chunks[rank]):  # the last to arrive stays: it is complete
            send(segment)

    for segment in chunks[rank - 1]:
        _add(flat, segment, addends)
        if size > 1:
            send(segment)
    yield from _receive(
        comm, arriving, wire.receives_ahead, lambda i, low, high: landing[i % len(landing)][: high - low], take, tag
    )
    return sends


def all_gather(comm, flat, start, stop, wire, tag, earlier_sends=(), own_is_sent=nothing):
    """Generator: every rank gets every owner's chunk of flat[start:stop].

    earlier_sends: of the same vector, in the order in which its segments come back. own_is_sent(start, stop) is called
    when the own chunk is on its way.
    """
    size, rank = comm.size, comm.rank
    chunks = [wire.segments(*chunk) for chunk in cut_range(start, stop, size)]
    arriving = [segment for step in range(size - 1) for segment in chunks[(rank - 1 - step) % size]]
    sends = []

    def send(buffer):
        sends.append(comm.Isend(buffer, (rank + 1) % size, tag))

    def take(index, segment, received):
        if index < len(arriving) - len(chunks[(rank + 1) % size]):  # the last to arrive is the next rank's own
            send(received)
        wire.arrived(flat, *segment)

    for segment in chunks[rank] if size > 1 else ():
        wire.rounded(flat, *segment)
        send(wire.gathered(flat, *segment))
    own_is_sent(*own_chunk(size, rank, start, stop))
    yield from _receive(
        comm, arriving, wire.receives_ahead, lambda i, low, high: wire.gathered(flat, low, high), take, tag,
        earlier_sends,
    )  # fmt: skip
    yield from sends


def _add(flat, segment, addends, *received) -> None:
    """Add this rank's other vectors, and what has come, to a segment of its own."""
    total = flat[slice(*segment)]
    for addend in (*(addend[slice(*segment)] for addend in addends), *received):
        total += addend


def _receive(comm, arriving, ahead, buffer_of, take, tag, earlier_sends=()):
    """Generator: take(index, segment, buffer) of each arriving segment in its order, so many receives posted ahead."""
    source, posted = (comm.rank - 1) % comm.size, deque()
    ahead = min(ahead, len(arriving))
    for index in range(len(arriving) + ahead):
        if index >= ahead:
            buffer, request = posted.popleft()
            yield request
            take(index - ahead, arriving[index - ahead], buffer)
        if index < len(arriving):
            if earlier_sends:
                yield earlier_sends[index]
            buffer = buffer_of(index, *arriving[index])
            posted.append((buffer, comm.Irecv(buffer, source, tag)))


def own_chunk(size: int, rank: int, start: int, stop: int) -> tuple[int, int]:
    """The part of [start, stop) whose sum a reduce-scatter over `size` ranks leaves on `rank`."""
    return cut_range(start, stop, size)[rank]
