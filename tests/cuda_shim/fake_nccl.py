"""cupy.cuda.nccl over MPI: what each call does to the memory its addresses name, when its stream comes to it."""

import ctypes
from types import SimpleNamespace

import numpy as np
from cuda_shim.fake_streams import stream_at
from mpi4py import MPI

UNIQUE_ID_BYTES = 128


class NcclCommunicator:
    """Refuses what may hang: calls on two streams, a group that is not closed."""

    def __init__(self, size, unique_id, rank):
        self.comm, self.stream = MPI.COMM_WORLD.Dup(), None
        assert (size, rank) == (self.comm.size, self.comm.rank)
        assert len(unique_id) == UNIQUE_ID_BYTES
        assert len(set(self.comm.allgather(unique_id))) == 1, "one id for all"

    def allReduce(self, send, receive, count, dtype, op, stream):
        self._queue(
            stream, dtype, op, lambda: self.comm.Allreduce(_vector(send, count).copy(), _vector(receive, count))
        )

    def reduce(self, send, receive, count, dtype, op, root, stream):
        def work():
            target = _vector(receive, count) if self.comm.rank == root else None
            self.comm.Reduce(_vector(send, count).copy(), target, root=root)

        self._queue(stream, dtype, op, work)

    def broadcast(self, send, receive, count, dtype, root, stream):
        def work():
            values = _vector(send, count).copy()
            self.comm.Bcast(values, root=root)
            _vector(receive, count)[:] = values

        self._queue(stream, dtype, 0, work)

    def reduceScatter(self, send, receive, count, dtype, op, stream):
        def work():
            values = _vector(send, count * self.comm.size).copy()
            self.comm.Reduce_scatter_block(values, _vector(receive, count))

        self._queue(stream, dtype, op, work)

    def allGather(self, send, receive, count, dtype, stream):
        def work():
            self.comm.Allgather(_vector(send, count).copy(), _vector(receive, count * self.comm.size))

        self._queue(stream, dtype, 0, work)

    def _queue(self, stream, dtype, op, work):
        assert (dtype, op) == (7, 0), "sums of float32"
        assert self.stream in (None, stream), "one communicator on two streams"
        self.stream = stream
        Group.calls += 1
        stream_at(stream).add(work)


class Group:
    """What is between groupStart and groupEnd, which ranks may give in any order; here it is in one."""

    depth, calls = 0, 0

    @classmethod
    def start(cls):
        assert cls.depth == 0
        cls.depth = 1

    @classmethod
    def end(cls):
        assert cls.depth == 1
        cls.depth = 0


def _vector(address, count):
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))


def module(available):
    if not available:
        return SimpleNamespace(available=False)
    return SimpleNamespace(
        available=True, NCCL_FLOAT32=7, NCCL_SUM=0, NcclCommunicator=NcclCommunicator,
        get_unique_id=lambda: np.random.default_rng().bytes(UNIQUE_ID_BYTES),
        groupStart=Group.start, groupEnd=Group.end,
    )  # fmt: skip
