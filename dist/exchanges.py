"""Exchanges of ranges of a vector, range by range. Between GPUs: device_calls.py, device_ring.py, device_tree.py,
node_exchange.py.

Each offers the first of these, or the others, or all: generators to be given to its `progress`, in one order on all
ranks:

    allreduce(flat)       flat, float32, becomes the sum over the ranks
    reduce_scatter(flat)  the part of flat that a rank owns becomes the sum; the rest may be spoiled
    all_gather(flat)      every rank gets every owner's part of flat

own_part(start, stop): the part of a range that this rank owns, perhaps none. rounds: whether values come rounded to the
wire's dtype. Between GPUs those that can round sums take `errors` too, as long as flat, float32: what rounding takes
from them is left there, and is added in the next exchange (device_wire.py). All are made of (comm, ranges, wire,
segment_bytes); ranges: what will be exchanged.
"""

from dist.host import ring
from dist.progress import Progress
from dist.wire import new_wire

TAG = 1  # one for all: no exchange begins before the one before it has ended


class Rings:
    """Between arrays in host memory, one at a time. Collective. wire, segment_bytes: as dist.wire.new_wire's."""

    def __init__(self, comm, ranges, wire: str, segment_bytes: int):
        self._comm, self.progress = comm.Dup(), Progress(in_flight=1)
        self._wire, self.rounds = new_wire(wire, longest(ranges), segment_bytes), wire != "float32"

    def own_part(self, start: int, stop: int) -> tuple[int, int]:
        return ring.own_chunk(self._comm.size, self._comm.rank, start, stop)

    def allreduce(self, flat):
        return ring.allreduce(self._comm, flat, [], 0, len(flat), self._wire, TAG)

    def reduce_scatter(self, flat):
        return ring.reduce_scatter(self._comm, flat, [], 0, len(flat), self._wire, TAG)

    def all_gather(self, flat):
        return ring.all_gather(self._comm, flat, 0, len(flat), self._wire, TAG)


def longest(ranges) -> int:
    return max(stop - start for start, stop in ranges)
