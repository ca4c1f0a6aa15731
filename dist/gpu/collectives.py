"""Exchanges between GPUs by calls of a communicator, one for each: how its ranks speak is the library's business.

Their sums are float32, and so is what they send.
"""

from dist.gpu.buffers import device_zeros
from dist.gpu.comm import DeviceComm
from dist.mpi import MPI
from dist.ranges import cut, longest


class AllreduceCall:
    """An exchange, see exchange.py, of whole ranges alone; it needs no memory."""

    def __init__(self, comm: DeviceComm, ranges, wire_format=None):
        self._comm = comm

    def allreduce(self, flat) -> None:
        self._comm.Allreduce(MPI.IN_PLACE, flat)


class DeviceCollectives:
    """An exchange of ranges in parts. owners: only the first so many ranks own a part, all if None."""

    def __init__(self, comm: DeviceComm, ranges, wire_format=None, owners: int | None = None):
        self._comm, self._owners = comm, owners or comm.size
        most = -(-longest(ranges) // self._owners) if comm.size > 1 else 0
        self._landing = device_zeros(comm.device, most)

    def own_part(self, start: int, stop: int) -> tuple[int, int]:
        low, high = self._parts(stop - start)[self._comm.rank]
        return start + low, start + high

    def reduce_scatter(self, flat) -> None:
        if self._comm.size > 1:
            start, stop = self.own_part(0, len(flat))
            landing, counts = self._landing[: stop - start], self._counts(flat)
            if len(set(counts)) == 1:
                self._comm.Reduce_scatter_block(flat, landing)
            else:
                self._comm.Reduce_scatter(flat, landing, counts)
            flat[start:stop] = landing

    def all_gather(self, flat) -> None:
        if self._comm.size > 1:
            counts = self._counts(flat)
            if len(set(counts)) == 1:
                self._comm.Allgather(MPI.IN_PLACE, flat)
            else:
                self._comm.Allgatherv(MPI.IN_PLACE, [flat, counts])

    def _counts(self, flat) -> list[int]:
        return [stop - start for start, stop in self._parts(len(flat))]

    def _parts(self, length: int) -> list[tuple[int, int]]:
        """By rank."""
        return cut(length, self._owners) + [(length, length)] * (self._comm.size - self._owners)
