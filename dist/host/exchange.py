"""Exchanges of ranges of vectors in host memory, for strategies: rings and trees, with wires and tags.

An exchange, here or between GPUs (dist/gpu/exchange.py), is constructed from (comm, ranges, wire_format) and has:

    engine                                  starts and advances exchanges, in the same order on all ranks
    errors                                  (size,) float32: rounding errors of this rank's sums so far, or None
    start_allreduce(vector, start, stop)    for Replicated: starts an all-reduce of [start, stop)
    reduce_scatter(vector, start, stop)     for Sharded, an iterator for `engine`: each rank gets the sum of its part
    all_gather(vector, start, stop)         likewise: all ranks get the owners' parts
    own_part(start, stop)                   likewise: the part of a range that this rank owns, perhaps none
    is_lossy                                likewise: whether values arrive rounded

Rings use host_ring.py, trees host_tree.py; direct_exchange.py has the exchange for an int8 wire. Vectors are float32;
the WireFormat says how they travel.
"""

import itertools
from dataclasses import replace

from dist.host import host_ring, host_tree
from dist.progress_engine import ProgressEngine
from dist.ranges import cut_range, longest
from dist.wire import WireFormat

FLOAT32 = WireFormat()
TAGS = 1 << 14  # used in turn; every MPI allows twice as many


class RingExchange:
    """Exchanges around one ring of the ranks of comm (host_ring.py). Collective.

    addends: other vectors of this rank's node, added to its own on the way. one_at_a_time: an exchange starts when the
    previous one has ended, so the wire needs memory for the longest range only (dist/sharded.py). Hierarchical also
    calls `allreduce`, an iterator, and `round_to_wire`.
    """

    def __init__(self, comm, ranges, wire_format: WireFormat = FLOAT32, addends=(), one_at_a_time: bool = False):
        self._comm = comm.Dup()
        self._addends = addends
        self._one_at_a_time = one_at_a_time
        self.engine = ProgressEngine(in_flight=1) if one_at_a_time else ProgressEngine()
        size = longest(ranges) if one_at_a_time else max(stop for _, stop in ranges)
        self._wire = wire_format.new(size)
        self.is_lossy = wire_format.is_lossy
        self.errors = self._wire.errors
        # Gathered values are not sums of this rank: their errors must not mix with those that are fed back.
        self._gathering_wire = self._wire if one_at_a_time else replace(wire_format, error_feedback=False).new(size)
        self._tags = itertools.cycle(range(1, TAGS))

    def own_part(self, start: int, stop: int) -> tuple[int, int]:
        return cut_range(start, stop, self._comm.size)[self._comm.rank]

    def start_allreduce(self, vector, start: int, stop: int) -> None:
        self.engine.start(self.allreduce(vector, start, stop))

    # Plain methods that return generators: each call takes a tag at once, so all ranks take tags in the same order,
    # however late the exchanges begin to move.

    def allreduce(self, vector, start: int, stop: int, on_own_chunk=None):
        flat, start, stop = self._place(vector, start, stop)
        tag = next(self._tags)
        return host_ring.allreduce(self._comm, flat, self._addends, start, stop, self._wire, tag, on_own_chunk)

    def reduce_scatter(self, vector, start: int, stop: int):
        flat, start, stop = self._place(vector, start, stop)
        return host_ring.reduce_scatter(self._comm, flat, self._addends, start, stop, self._wire, next(self._tags))

    def all_gather(self, vector, start: int, stop: int):
        flat, start, stop = self._place(vector, start, stop)
        return host_ring.all_gather(self._comm, flat, start, stop, self._gathering_wire, next(self._tags))

    def round_to_wire(self, vector, start: int, stop: int) -> None:
        """Round values of a vector to what the other ranks will gather."""
        self._gathering_wire.rounded(vector, start, stop)

    def _place(self, vector, start: int, stop: int):
        """Return (array, start, stop) of a range, as positions in the wire's memory."""
        return (vector[start:stop], 0, stop - start) if self._one_at_a_time else (vector, start, stop)


class TreeExchange:
    """All-reduces over two binary trees of the ranks of comm (host_tree.py). Collective."""

    def __init__(self, comm, ranges, wire_format: WireFormat = FLOAT32):
        self._comm = comm.Dup()
        self.engine = ProgressEngine()
        self._wire = wire_format.new(max(stop for _, stop in ranges))
        self.errors = self._wire.errors
        self._tags = itertools.cycle(range(1, TAGS))

    def start_allreduce(self, vector, start: int, stop: int) -> None:
        tags = next(self._tags), next(self._tags)
        for way in host_tree.allreduce(self._comm, vector, start, stop, self._wire, tags):
            self.engine.start(way)
