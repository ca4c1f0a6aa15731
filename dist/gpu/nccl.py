"""NCCL under the names of mpi4py: the calls that strategies make, for float32 arrays on the GPU.

All calls are queued on one stream: a call sends the results of earlier work, later work sees what the call received,
and the host waits for neither. NCCL hangs if ranks make their calls in different orders. All communicators of a rank
share one stream, so there is one order: the order of the strategy's calls.
"""

import warnings
from functools import partial

import numpy as np

from dist.gpu.comm import DeviceComm
from dist.mpi import MPI
from dist.ranges import side_by_side


def missing_nccl() -> str | None:
    """Return why NCCL cannot be used in this process, or None."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy warns in several lines if it does not find the library
        try:
            from cupy.cuda import nccl
        except ImportError as error:
            return str(error).splitlines()[0]
    return None if nccl.available else "CuPy finds no libnccl.so.2"


class NcclComm(DeviceComm):
    """A communicator over NCCL: each rank has its own GPU, `device`, as this process sees it. Collective.

    op: MPI.SUM as in mpi4py's calls, for Allreduce also MPI.MAX; NCCL's own operation is used.
    """

    def __init__(self, comm, device, stream, local_comm=None):
        super().__init__(comm, device, stream, local_comm)
        from cupy.cuda import nccl

        self._nccl = nccl
        unique_id = comm.bcast(nccl.get_unique_id() if self.rank == 0 else None)
        self._communicator = nccl.NcclCommunicator(self.size, unique_id, self.rank)

    def Reduce(self, send, receive, op=None, root: int = 0) -> None:
        """Sum into the root's `receive`, which holds the root's own vector if send is MPI.IN_PLACE."""
        own = receive if send is MPI.IN_PLACE else send
        target = own if receive is None else receive  # NCCL writes on the root alone
        self._communicator.reduce(*self._pair(own, target), own.size, *self._sum, root, self.stream.ptr)

    def Bcast(self, buffer, root: int) -> None:
        pair = self._pair(buffer, buffer)
        self._communicator.broadcast(*pair, buffer.size, self._nccl.NCCL_FLOAT32, root, self.stream.ptr)

    def Allreduce(self, send, receive, op=None) -> None:
        own = receive if send is MPI.IN_PLACE else send
        kind = self._nccl.NCCL_FLOAT32, self._nccl.NCCL_MAX if op == MPI.MAX else self._nccl.NCCL_SUM
        self._communicator.allReduce(*self._pair(own, receive), own.size, *kind, self.stream.ptr)

    def Reduce_scatter_block(self, send, receive, op=None) -> None:
        self._communicator.reduceScatter(*self._pair(send, receive), receive.size, *self._sum, self.stream.ptr)

    def Reduce_scatter(self, send, receive, counts) -> None:
        """Give each rank the sum of its part of `send`, of counts[rank] elements."""
        self._for_each_part(counts, lambda root, part: self.Reduce(send[part], receive, root=root))

    def Allgather(self, send, receive) -> None:
        block = receive.size // self.size
        own = receive[self.rank * block : (self.rank + 1) * block] if send is MPI.IN_PLACE else send
        pair = self._pair(own, receive)
        self._communicator.allGather(*pair, block, self._nccl.NCCL_FLOAT32, self.stream.ptr)

    def Allgatherv(self, send, receive) -> None:
        """Gather in place (send is MPI.IN_PLACE). receive: the whole vector, and the elements of each rank's part."""
        flat, counts = receive
        self._for_each_part(counts, lambda root, part: self.Bcast(flat[part], root))

    def send_and_receive(self, sends, receives) -> None:
        """Make all calls in one group: a send waits for its receive, so single calls could deadlock."""
        types = {np.float32: self._nccl.NCCL_FLOAT32, np.uint16: self._nccl.NCCL_BFLOAT16}
        calls = [
            partial(call, _address(array, types), array.size, types[array.dtype.type], peer, self.stream.ptr)
            for call, messages in ((self._communicator.send, sends), (self._communicator.recv, receives))
            for array, peer in messages
            if array.size
        ]
        self._nccl.groupStart()
        for call in calls:
            call()
        self._nccl.groupEnd()

    def _for_each_part(self, counts, call) -> None:
        """Call call(rank, its part) for all non-empty parts, in one group: NCCL has no call for unequal parts."""
        self._nccl.groupStart()
        for root, (start, stop) in enumerate(side_by_side(counts)):
            if start < stop:
                call(root, slice(start, stop))
        self._nccl.groupEnd()

    @property
    def _sum(self):
        return self._nccl.NCCL_FLOAT32, self._nccl.NCCL_SUM

    @staticmethod
    def _pair(send, receive) -> tuple[int, int]:
        return _address(send), _address(receive)


def _address(array, types=(np.float32,)) -> int:
    """Return the address of an array; TypeError if its dtype is not one of `types`, or if it has gaps."""
    if array.dtype.type not in types or not array.flags.c_contiguous:
        names = " or ".join(np.dtype(each).name for each in types)
        raise TypeError(f"NCCL is given {array.dtype} of strides {array.strides}, expected contiguous {names}")
    return array.data.ptr
