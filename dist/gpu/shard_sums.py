"""Tensor-parallel sums of arrays on GPUs: by a communicator's calls, or through host memory.

Both classes have the methods of ShardSums (dist/shard_sums.py), for arrays of float32 or bfloat16. They add in float32
and in place, so a bfloat16 sum is rounded once. All ranks get the same bits.
"""

from functools import partial

import numpy as np

from dist.gpu.buffers import device_zeros
from dist.gpu.comm import DeviceComm
from dist.gpu.staging import HostStaging
from dist.mpi import MPI
from dist.ranges import cut
from dist.shard_sums import ShardSums
from dist.waiting import wait, wait_nearby


class StreamSums:
    """Sums by calls of comm, in order with the compute. NCCL queues them, so the host does not wait.

    elements: of the largest array, of this dtype. phase(name, bytes): as in new_shard_sums.
    """

    def __init__(self, comm: DeviceComm, elements: int, dtype, phase):
        self.size = comm.size
        self._comm = comm
        self._phase = phase
        self._values = device_zeros(comm.device, 0 if dtype == np.float32 else elements)

    def share(self, count: int) -> tuple[int, int]:
        return cut(count, self.size)[self._comm.rank]

    def room(self, shape: tuple[int, ...]) -> None:
        """Return None: partial sums need no particular buffer."""

    def sum(self, rows):
        return self._combined(rows, MPI.SUM)

    def maximum(self, rows):
        return self._combined(rows, MPI.MAX)

    def broadcast(self, arrays) -> None:
        with self._phase("lend", 4 * sum(array.size for array in arrays)):
            for array in arrays:
                self._in_float32(array, lambda values: self._comm.Bcast(values, root=0))

    def join(self, rows):
        counts = [stop - start for start, stop in cut(rows.size, self.size)]
        with self._phase("tensor", 4 * rows.size):
            self._in_float32(rows, lambda values: self._comm.Allgatherv(MPI.IN_PLACE, [values, counts]))
        return rows

    def _combined(self, rows, op):
        with self._phase("tensor", 4 * rows.size):
            self._in_float32(rows, partial(self._comm.Allreduce, MPI.IN_PLACE, op=op))
        return rows

    def _in_float32(self, array, call) -> None:
        """Call call(values) with the array's elements, or with a float32 copy that is then rounded into the array."""
        flat = array.reshape(-1)
        if flat.dtype == np.float32:
            return call(flat)
        values = self._values[: flat.size]
        values[:] = flat
        call(values)
        flat[:] = values


class SumsThroughHost:
    """Sums by dist/shard_sums.py: rows are copied to this rank's buffer on the host, and their sum back.

    Before a sum the host waits for the compute and the copy to the host; compute queued later waits for the copy back.
    phase(name, bytes) times the copies. `sums` times the sums; its creator closes it.
    """

    def __init__(self, sums: ShardSums, staging: HostStaging, phase):
        self.size = sums.size
        self.share = sums.share
        self._sums = sums
        self._staging = staging
        self._phase = phase
        staging.pin(sums.room((sums.elements,)))
        self._brought = staging.computed()

    def room(self, shape: tuple[int, ...]) -> None:
        """Return None: partial sums stay on the GPU."""

    def sum(self, rows):
        return self._through(rows, self._sums.sum)

    def maximum(self, rows):
        return self._through(rows, self._sums.maximum)

    def join(self, rows):
        return self._through(rows, self._sums.join)

    def broadcast(self, arrays) -> None:
        stops = np.cumsum([array.size for array in arrays])
        room = self._sums.room((int(stops[-1]),))
        hosts = np.split(room, stops[:-1])
        wait(self._brought)  # copied from this buffer
        if self._sums.rank == 0:
            for array, host in zip(arrays, hosts, strict=True):
                self._bring_down(array, host)
        self._sums.broadcast([room])
        if self._sums.rank > 0:
            for array, host in zip(arrays, hosts, strict=True):
                self._bring_up(host, array)

    def _through(self, rows, combine):
        host = self._sums.room(rows.shape)
        self._bring_down(rows, host)
        self._bring_up(combine(host), rows)
        return rows

    def _bring_down(self, array, host) -> None:
        with self._phase("copy_out", host.nbytes):
            wait_nearby(self._staging.out(array.reshape(-1), host.reshape(-1)))

    def _bring_up(self, host, array) -> None:
        self._staging.pin(host)
        with self._phase("copy_in", host.nbytes):
            self._brought = self._staging.bring(host.reshape(-1), array.reshape(-1))
