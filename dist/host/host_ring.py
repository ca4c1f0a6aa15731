"""The ring: reduce-scatter and all-gather in N-1 steps each, both directions of every port busy (Patarasuk, Yuan 2009).

The vector is cut into one chunk per rank. In the reduce-scatter, chunk r starts at rank r+1 and travels the ring to
rank r, and each rank adds its own values on the way. In the all-gather it travels on, and every rank keeps a copy. A
rank sends and receives (N-1)/N of the vector in each of the two collectives: no schedule moves less.

Chunks travel in segments, passed on as they arrive, so the network waits neither for additions nor for the end of a
step. These are generators for the ProgressEngine. wire: a dist.wire.PlainWire. tag: used by this exchange only.
"""

from collections import deque

import numpy as np

from dist.ranges import cut_range


def allreduce(comm, flat, addends, start, stop, wire, tag, on_own_chunk=None):
    """Generator: replace flat[start:stop], of wire.dtype or float32, by its sum over comm's ranks and their `addends`.

    addends: other vectors of this rank's node to add to its own (hierarchical), or none. Each sum is computed once, in
    a fixed order, so all ranks and all runs get the same bits. All ranks pass the same range and tag. on_own_chunk: see
    all_gather.
    """
    sends = yield from _reduce_scatter(comm, flat, addends, start, stop, wire, tag)
    yield from all_gather(comm, flat, start, stop, wire, tag, sends, on_own_chunk)


def reduce_scatter(comm, flat, addends, start, stop, wire, tag):
    """Generator: sum this rank's chunk, cut_range(start, stop, comm.size)[comm.rank], in place; overwrite the rest."""
    sends = yield from _reduce_scatter(comm, flat, addends, start, stop, wire, tag)
    yield from sends


def _reduce_scatter(comm, flat, addends, start, stop, wire, tag):
    """Return the sends that may not be complete, in the order in which all_gather reuses their memory."""
    size = comm.size
    rank = comm.rank
    chunks = [wire.segments(*chunk) for chunk in cut_range(start, stop, size)]
    arriving = [segment for step in range(size - 1) for segment in chunks[(rank - 2 - step) % size]]
    longest = max((high - low for low, high in arriving), default=0)
    landing = [np.empty(longest, wire.dtype) for _ in range(min(wire.receives_ahead, len(arriving)))]
    sends = []

    def send(segment):
        sends.append(comm.Isend(wire.packed(flat, *segment), (rank + 1) % size, tag))

    def take(index, segment, received):
        add(flat, segment, addends, wire.unpacked(received))
        if index < len(arriving) - len(chunks[rank]):  # the last chunk to arrive is the complete sum, and stays
            send(segment)

    for segment in chunks[rank - 1]:
        add(flat, segment, addends)
        if size > 1:
            send(segment)
    yield from _receive(comm, arriving, wire, lambda i, low, high: landing[i % len(landing)][: high - low], take, tag)
    return sends


def all_gather(comm, flat, start, stop, wire, tag, earlier_sends=(), on_own_chunk=None):
    """Generator: bring every owner's chunk of flat[start:stop] to every rank.

    earlier_sends: from the same vector, in the order in which its segments come back. on_own_chunk(start, stop) is
    called once, when this rank's chunk is final and its sends are posted, not when they have completed.
    """
    size = comm.size
    rank = comm.rank
    chunks = [wire.segments(*chunk) for chunk in cut_range(start, stop, size)]
    arriving = [segment for step in range(size - 1) for segment in chunks[(rank - 1 - step) % size]]
    sends = []

    def send(buffer):
        sends.append(comm.Isend(buffer, (rank + 1) % size, tag))

    def take(index, segment, received):
        if index < len(arriving) - len(chunks[(rank + 1) % size]):  # the last chunk to arrive is the next rank's own
            send(received)
        wire.arrived(flat, *segment)

    for segment in chunks[rank] if size > 1 else ():
        wire.rounded(flat, *segment)
        send(wire.gathered(flat, *segment))
    if on_own_chunk:
        on_own_chunk(*cut_range(start, stop, size)[rank])
    yield from _receive(comm, arriving, wire, lambda _, *bounds: wire.gathered(flat, *bounds), take, tag, earlier_sends)
    yield from sends


def add(flat, segment, addends, *received) -> None:
    """Add this rank's addends, and the received segment, to its own segment."""
    total = flat[slice(*segment)]
    for addend in (*(addend[slice(*segment)] for addend in addends), *received):
        total += addend


def _receive(comm, arriving, wire, buffer_of, take, tag, earlier_sends=()):
    """Generator: call take(index, segment, buffer) for each arriving segment in order, with receives posted ahead."""
    source = (comm.rank - 1) % comm.size
    posted = deque()
    ahead = min(wire.receives_ahead, len(arriving))
    for index in range(len(arriving) + ahead):
        if index >= ahead:
            buffer, request = posted.popleft()
            yield request
            take(index - ahead, arriving[index - ahead], buffer)
        if index < len(arriving):
            if earlier_sends:  # wait for the send from the memory that the next receive overwrites
                yield earlier_sends[index]
            buffer = buffer_of(index, *arriving[index])
            posted.append((buffer, comm.Irecv(buffer, source, tag)))
