"""The direct exchange: each rank sends its values of a chunk straight to the chunk's owner, and gets the sum back.

Every rank owns one chunk of the vector. It adds the contributions of the others to its own values in float32, in a
fixed order, and sends the sum to all. So each value is rounded once on its way to the owner and once on its way back,
as in the compressed all-reduce of 1-bit Adam (Tang et al. 2021), while a ring would round at every hop. A rank sends
and receives 2 (N-1)/N of the vector, as in a ring.

In turn s a rank sends segment s of every chunk, sums segment s - AHEAD of its own chunk, and takes segment s - 2 AHEAD
of the others' sums: both directions of every port stay busy. Rank r sends to r+1, r+2, ..., so that no two ranks begin
with the same receiver. The generator is for the ProgressEngine.
"""

import itertools
from collections import deque
from dataclasses import replace

from dist.host.host_ring import add
from dist.progress_engine import ProgressEngine
from dist.ranges import cut_range
from dist.wire import LANDING_BYTES, WireFormat

AHEAD = 2  # turns between sending a segment and summing it, and between its sum and taking the others'
TAGS = 1 << 14


class DirectExchange:
    """Direct exchanges between the ranks of comm, rounded to int8 on the wire: what hierarchical uses of exchange.py.

    addends: other vectors of this rank's node, added to its own before they are sent. Collective.
    """

    def __init__(self, comm, ranges, wire_format: WireFormat, addends=()):
        self._comm = comm.Dup()
        self._addends = addends
        self.engine = ProgressEngine()
        # The messages of a turn are for all other ranks: more ranks, shorter messages.
        segment_bytes = min(wire_format.segment_bytes, LANDING_BYTES // comm.size)
        self._wire = replace(wire_format, segment_bytes=segment_bytes).new(max(stop for _, stop in ranges))
        self.errors = self._wire.errors
        self._tags = itertools.cycle(range(1, TAGS))

    def allreduce(self, vector, start: int, stop: int, on_own_chunk=None):
        """Return a generator. A plain method: each call takes its tags at once, in the same order on all ranks."""
        tags = next(self._tags), next(self._tags)
        return allreduce(self._comm, vector, self._addends, start, stop, self._wire, tags, on_own_chunk)


def allreduce(comm, flat, addends, start, stop, wire, tags, on_own_chunk=None):
    """Generator: replace float32 flat[start:stop] by its sum over comm's ranks and their `addends`, rounded.

    All ranks get the same bits. wire: a dist.wire.Int8Wire. tags: of values and of sums. on_own_chunk(start, stop) is
    called once, when this rank's chunk is final.
    """
    others = [(comm.rank + step) % comm.size for step in range(1, comm.size)]
    sources = others[::-1]  # in the order in which their messages to this rank leave
    chunks = [wire.segments(*chunk) for chunk in cut_range(start, stop, comm.size)]
    own = chunks[comm.rank]
    turns = max(1, *map(len, chunks))
    ahead = (AHEAD + 1) * len(others)
    values = Inbox(comm, [(source, segment) for segment in own for source in sources], wire, ahead, tags[0])
    turns_of_others = itertools.product(range(turns), others)
    expected = [(owner, segment) for turn, owner in turns_of_others for segment in _of_turn(chunks[owner], turn)]
    sums = Inbox(comm, expected, wire, ahead, tags[1])
    sends = deque()
    for turn in range(turns + 2 * AHEAD):
        for owner in (comm.rank, *others):
            for segment in _of_turn(chunks[owner], turn):
                add(flat, segment, addends)
                if owner != comm.rank:
                    sends.append(comm.Isend(wire.packed(flat, *segment), owner, tags[0]))
        for segment in _of_turn(own, turn - AHEAD) if others else ():
            for _ in sources:
                wire.unpack((yield from values.take()), flat, *segment, adds=True)
            message = wire.packed(flat, *segment)
            wire.unpack(message, flat, *segment)
            sends += [comm.Isend(message, other, tags[1]) for other in others]
        if turn - AHEAD == turns - 1 and on_own_chunk:
            on_own_chunk(*cut_range(start, stop, comm.size)[comm.rank])
        for owner in others:
            for segment in _of_turn(chunks[owner], turn - 2 * AHEAD):
                wire.unpack((yield from sums.take()), flat, *segment)
        while len(sends) > 2 * AHEAD * len(others):  # a rank in this turn has posted the receives of these sends
            yield sends.popleft()
    yield from sends


def _of_turn(chunk: list[tuple[int, int]], turn: int) -> list[tuple[int, int]]:
    """Return the chunk's segment of a turn in a list, [] if it has none."""
    return chunk[turn : turn + 1] if turn >= 0 else []


class Inbox:
    """Receives messages in the expected order, [(source, segment)]; at most `ahead` receives are posted."""

    def __init__(self, comm, expected, wire, ahead: int, tag: int):
        self._comm = comm
        self._expected = iter(expected)
        self._wire = wire
        self._tag = tag
        self._posted = deque()
        for _ in range(ahead):
            self._post()

    def take(self):
        """Generator: wait for the next message, and return it."""
        message, request = self._posted.popleft()
        yield request
        self._post()
        return message

    def _post(self) -> None:
        for source, segment in itertools.islice(self._expected, 1):
            message = self._wire.message(*segment)
            self._posted.append((message, self._comm.Irecv(message, source, self._tag)))
