"""Exchanges between GPUs, each by one call of a communicator. They add and send float32."""

from dist.gpu.buffers import device_zeros
from dist.gpu.comm import DeviceComm
from dist.mpi import MPI
from dist.ranges import cut, longest


class AllreduceCall:
    """All-reduces of whole ranges (exchange.py); it needs no memory."""

    def __init__(self, comm: DeviceComm, ranges, wire_format=None):
        self._comm = comm

    def allreduce(self, flat) -> None:
        self._comm.Allreduce(MPI.IN_PLACE, flat)


class DeviceCollectives:
    """Reduce-scatters and all-gathers of ranges. owners: how many ranks, from rank 0 on, own a part; None: all."""

    def __init__(self, comm: DeviceComm, ranges, wire_format=None, owners: int | None = None):
        self._comm = comm
        self._owners = owners or comm.size
        most = -(-longest(ranges) // self._owners) if comm.size > 1 else 0
        self._landing = device_zeros(comm.device, most)

    def own_part(self, start: int, stop: int) -> tuple[int, int]:
        low, high = self._parts(stop - start)[self._comm.rank]
        return start + low, start + high

    def reduce_scatter(self, flat) -> None:
        if self._comm.size > 1:
            start, stop = self.own_part(0, len(flat))
            landing = self._landing[: stop - start]
            counts = self._counts(flat)
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
        """Return [start, stop) of each rank's part."""
        return cut(length, self._owners) + [(length, length)] * (self._comm.size - self._owners)
