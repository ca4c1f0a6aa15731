"""cupy.cuda.nccl over MPI: what each call does to the memory its addresses name, when its stream comes to it."""

import ctypes
from types import SimpleNamespace

import numpy as np
from cuda_shim.fake_streams import stream_at
from mpi4py import MPI

UNIQUE_ID_BYTES = 128


class NcclCommunicator:
    def __init__(self, size, unique_id, rank):
        self.comm = MPI.COMM_WORLD.Dup()
        assert (size, rank) == (self.comm.size, self.comm.rank)
        assert len(unique_id) == UNIQUE_ID_BYTES
        assert len(set(self.comm.allgather(unique_id))) == 1, "one id for all"

    def allReduce(self, send, receive, count, dtype, op, stream):
        self._run(stream, dtype, op)
        self.comm.Allreduce(_vector(send, count).copy(), _vector(receive, count))

    def reduce(self, send, receive, count, dtype, op, root, stream):
        self._run(stream, dtype, op)
        target = _vector(receive, count) if self.comm.rank == root else None
        self.comm.Reduce(_vector(send, count).copy(), target, root=root)

    def broadcast(self, send, receive, count, dtype, root, stream):
        self._run(stream, dtype)
        values = _vector(send, count).copy()
        self.comm.Bcast(values, root=root)
        _vector(receive, count)[:] = values

    def reduceScatter(self, send, receive, count, dtype, op, stream):
        self._run(stream, dtype, op)
        self.comm.Reduce_scatter_block(_vector(send, count * self.comm.size).copy(), _vector(receive, count))

    def allGather(self, send, receive, count, dtype, stream):
        self._run(stream, dtype)
        self.comm.Allgather(_vector(send, count).copy(), _vector(receive, count * self.comm.size))

    @staticmethod
    def _run(stream, dtype, op=0):
        assert (dtype, op) == (7, 0), "sums of float32"
        stream_at(stream).run()


def _vector(address, count):
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))


def module(available):
    if not available:
        return SimpleNamespace(available=False)
    return SimpleNamespace(
        available=True, NCCL_FLOAT32=7, NCCL_SUM=0, NcclCommunicator=NcclCommunicator,
        get_unique_id=lambda: np.random.default_rng().bytes(UNIQUE_ID_BYTES),
    )  # fmt: skip
