"""Exchanges of ranges of vectors in host memory, as strategies use them: ring.py and tree.py with what they need.

An exchange, here or between GPUs (dist/gpu/exchange.py), is made of (comm, ranges, wire_format) and has:

    allreduce, reduce_scatter, all_gather (vector, start, stop)   generators, to be started with its `engine`, in one
                                      order on all ranks; the sum of [start, stop) comes to all ranks, or each
                                      rank's own part of it does, or the owners' parts come to all ranks
    start_allreduce(vector, start, stop)    begin one
    own_part(start, stop)             the part of a range that this rank owns, perhaps none
    rounds                            whether values arrive rounded
    errors                            (size,) float32: what rounding took from this rank's sums so far, or None

Vectors are float32. In what format they travel is decided where a job is made, for all strategies.
"""

import itertools
from dataclasses import replace

from dist.host import host_ring, host_tree
from dist.progress_engine import ProgressEngine
from dist.ranges import longest
from dist.wire import WireFormat

FLOAT32 = WireFormat()
TAGS = 1 << 14  # of exchanges that may be under way together; every MPI allows twice as many


class RingExchange:
    """Around one ring of the ranks of comm (ring.py). Collective.

    addends: more vectors of this rank's node, which are added to its own on the way. one_at_a_time: no exchange begins
    before the last one has ended, so the wire's memory is that of the longest range, and a vector need only exist where
    it is exchanged (dist/sharded.py).
    """

    def __init__(self, comm, ranges, wire_format: WireFormat = FLOAT32, addends=(), one_at_a_time: bool = False):
        self._comm, self._addends, self._one_at_a_time = comm.Dup(), addends, one_at_a_time
        self.engine = ProgressEngine(in_flight=1) if one_at_a_time else ProgressEngine()
        size = longest(ranges) if one_at_a_time else max(stop for _, stop in ranges)
        self._wire, self.rounds = wire_format.new(size), wire_format.rounds
        self.errors = self._wire.errors
        # What is gathered is no sum of this rank's: its rounding must not mix with the errors that are fed back.
        self._gathering_wire = self._wire if one_at_a_time else replace(wire_format, error_feedback=False).new(size)
        self._tags = itertools.cycle(range(1, TAGS))

    def own_part(self, start: int, stop: int) -> tuple[int, int]:
        return host_ring.own_chunk(self._comm.size, self._comm.rank, start, stop)

    def start_allreduce(self, vector, start: int, stop: int) -> None:
        self.engine.start(self.allreduce(vector, start, stop))

    # Not generators themselves: a tag is taken when an exchange is made, which all ranks do in the same order, and not
    # when it begins to move.

    def allreduce(self, vector, start: int, stop: int, summed=host_ring.nothing):
        """summed(start, stop) is called halfway: the own part is the sum, and on its way to the others."""
        flat, start, stop = self._place(vector, start, stop)
        return host_ring.allreduce(self._comm, flat, self._addends, start, stop, self._wire, next(self._tags), summed)

    def reduce_scatter(self, vector, start: int, stop: int):
        flat, start, stop = self._place(vector, start, stop)
        return host_ring.reduce_scatter(self._comm, flat, self._addends, start, stop, self._wire, next(self._tags))

    def all_gather(self, vector, start: int, stop: int):
        flat, start, stop = self._place(vector, start, stop)
        return host_ring.all_gather(self._comm, flat, start, stop, self._gathering_wire, next(self._tags))

    def round(self, vector, start: int, stop: int) -> None:
        """Bring values of a vector to what the other ranks will gather of them."""
        self._gathering_wire.rounded(vector, start, stop)

    def _place(self, vector, start: int, stop: int):
        """(array, start, stop) of a range as the wire's memory counts."""
        return (vector[start:stop], 0, stop - start) if self._one_at_a_time else (vector, start, stop)


class TreeExchange:
    """All-reduces over two binary trees of the ranks of comm (tree.py). Collective."""

    def __init__(self, comm, ranges, wire_format: WireFormat = FLOAT32):
        self._comm = comm.Dup()
        self.engine = ProgressEngine()
        self._wire, self.rounds = wire_format.new(max(stop for _, stop in ranges)), wire_format.rounds
        self.errors = self._wire.errors
        self._tags = itertools.cycle(range(1, TAGS))

    def start_allreduce(self, vector, start: int, stop: int) -> None:
        tags = next(self._tags), next(self._tags)
        for way in host_tree.allreduce(self._comm, vector, start, stop, self._wire, tags):
            self.engine.start(way)
