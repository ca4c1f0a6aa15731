"""Exchanges of ranges of a vector, range by range: by rings of our own messages, or by the calls of a communicator.

Either offers generators to be given to its `progress`, in one order on all ranks:

    allreduce(flat)       flat, float32, becomes the sum over the ranks
    reduce_scatter(flat)  the part of flat that a rank owns (ring.own_chunk) becomes the sum; the rest may be spoiled
    all_gather(flat)      every rank gets every owner's part of flat

rounds: whether values come rounded to the wire's dtype.
"""

from mpi4py import MPI

from dist import ring
from dist.progress import Progress
from dist.ranges import cut
from dist.wire import new_wire

TAG = 1  # one for all: no exchange begins before the one before it has ended


class Rings:
    """Between arrays in host memory, one exchange at a time. Collective. ranges: what will be exchanged; wire,
    segment_bytes: as dist.wire.new_wire's."""

    def __init__(self, comm, ranges, wire: str, segment_bytes: int):
        self._comm, self.progress = comm.Dup(), Progress(in_flight=1)
        self._wire, self.rounds = new_wire(wire, _longest(ranges), segment_bytes), wire != "float32"

    def allreduce(self, flat):
        return ring.allreduce(self._comm, flat, [], 0, len(flat), self._wire, TAG)

    def reduce_scatter(self, flat):
        return ring.reduce_scatter(self._comm, flat, [], 0, len(flat), self._wire, TAG)

    def all_gather(self, flat):
        return ring.all_gather(self._comm, flat, 0, len(flat), self._wire, TAG)


class Calls:
    """Between arrays on GPUs, by a DeviceComm: an exchange is one call. ranges: what will be exchanged; progress: a
    StreamProgress on comm's stream; empty(shape): float32 memory on the GPU."""

    rounds = False

    def __init__(self, comm, ranges, progress, empty):
        self._comm, self.progress = comm, progress
        self._landing = empty((-(-_longest(ranges) // comm.size),))

    def allreduce(self, flat):
        self._comm.Allreduce(MPI.IN_PLACE, flat)
        yield from ()  # nothing that the host would wait for

    def reduce_scatter(self, flat):
        start, stop = ring.own_chunk(self._comm.size, self._comm.rank, 0, len(flat))
        landing = self._landing[: stop - start]
        self._comm.Reduce_scatter(flat, landing, self._counts(flat))
        flat[start:stop] = landing
        yield from ()

    def all_gather(self, flat):
        self._comm.Allgatherv(MPI.IN_PLACE, [flat, self._counts(flat)])
        yield from ()

    def _counts(self, flat) -> list[int]:
        return [stop - start for start, stop in cut(len(flat), self._comm.size)]


def _longest(ranges) -> int:
    return max(stop - start for start, stop in ranges)
