"""NCCL under the names of mpi4py: the calls that the strategies make, for float32 arrays on the GPU.

NCCL knows its ranks by an id that one of them makes; MPI hands it round. Everything is queued on the device's stream:
a call sends what the kernels before it leave, the kernels after it see what came, and the host waits for neither.
"""

import warnings

import numpy as np
from mpi4py import MPI


def missing_nccl() -> str | None:
    """Why NCCL cannot be used in this process, or None."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy's own, of several lines, where the library is not found
        try:
            from cupy.cuda import nccl
        except ImportError as error:
            return str(error).splitlines()[0]
    return None if nccl.available else "CuPy finds no libnccl.so.2"


class NcclComm:
    """The ranks of `comm`, each with a GPU of its own, `device`, as this process sees it. Collective."""

    def __init__(self, comm, device):
        from cupy.cuda import nccl

        self._nccl, self._comm, self._stream = nccl, comm, device.stream
        self.rank, self.size = comm.rank, comm.size
        unique_id = comm.bcast(nccl.get_unique_id() if self.rank == 0 else None)
        self._communicator = nccl.NcclCommunicator(self.size, unique_id, self.rank)

    def Reduce(self, send, receive, root: int) -> None:
        """The sum comes to `receive` of the root, or replaces its own vector: MPI.IN_PLACE."""
        own = receive if send is MPI.IN_PLACE else send
        target = own if receive is None else receive  # NCCL writes on the root alone
        self._communicator.reduce(*self._pair(own, target), own.size, *self._sum, root, self._stream.ptr)

    def Bcast(self, buffer, root: int) -> None:
        pair = self._pair(buffer, buffer)
        self._communicator.broadcast(*pair, buffer.size, self._nccl.NCCL_FLOAT32, root, self._stream.ptr)

    def Allreduce(self, send, receive) -> None:
        own = receive if send is MPI.IN_PLACE else send
        self._communicator.allReduce(*self._pair(own, receive), own.size, *self._sum, self._stream.ptr)

    def Reduce_scatter_block(self, send, receive) -> None:
        self._communicator.reduceScatter(*self._pair(send, receive), receive.size, *self._sum, self._stream.ptr)

    def Allgather(self, send, receive) -> None:
        block = receive.size // self.size
        own = receive[self.rank * block : (self.rank + 1) * block] if send is MPI.IN_PLACE else send
        pair = self._pair(own, receive)
        self._communicator.allGather(*pair, block, self._nccl.NCCL_FLOAT32, self._stream.ptr)

    def allreduce(self, number):
        """Of Python numbers, by MPI."""
        return self._comm.allreduce(number)

    @property
    def _sum(self):
        return self._nccl.NCCL_FLOAT32, self._nccl.NCCL_SUM

    @staticmethod
    def _pair(send, receive) -> tuple[int, int]:
        """Both addresses, of arrays that are what NCCL is told they are."""
        for array in (send, receive):
            if array.dtype != np.float32 or not array.flags.c_contiguous:
                raise TypeError(f"NCCL is given {array.dtype} of strides {array.strides}, expected contiguous float32")
        return send.data.ptr, receive.data.ptr
