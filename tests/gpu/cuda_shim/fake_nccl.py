"""cupy.cuda.nccl over MPI: what each call does to the memory its addresses name, when its stream comes to it."""

import ctypes
import struct
import time
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from dist.waiting import Pauses
from tests.gpu.cuda_shim.fake_streams import stream_at

UNIQUE_ID_BYTES = 128
FLOAT32, BFLOAT16 = 7, 9
C_TYPES = {FLOAT32: ctypes.c_float, BFLOAT16: ctypes.c_uint16}
SUM, MAX = 0, 2
OPERATIONS = {SUM: MPI.SUM, MAX: MPI.MAX}
MEETING = 4711  # tag
PATIENCE_S = 60.0  # what is to come takes longer only where it never comes


class NcclCommunicator:
    """Refuses what may hang: calls on two streams, a group that is not closed, a receive that nobody sends to."""

    def __init__(self, size, unique_id, rank):
        self.comm, self.stream = members(size, unique_id, rank), None

    def allReduce(self, send, receive, count, dtype, op, stream):
        def work():
            self.comm.Allreduce(_vector(send, count).copy(), _vector(receive, count), OPERATIONS[op])

        self._queue(stream, dtype, SUM if op == MAX else op, work)

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

    def send(self, send, count, dtype, peer, stream):
        self._point_to_point(stream, Message(peer, send, count, dtype, sent=True))

    def recv(self, receive, count, dtype, peer, stream):
        self._point_to_point(stream, Message(peer, receive, count, dtype, sent=False))

    def _point_to_point(self, stream, message):
        assert Group.depth, "outside of a group a send waits for its receive, and none comes"
        self._use(stream)
        Group.messages.setdefault(self, []).append(message)

    def _queue(self, stream, dtype, op, work):
        assert (dtype, op) == (FLOAT32, SUM), "sums of float32"
        self._use(stream)
        stream_at(stream).add(work)

    def _use(self, stream):
        assert self.stream in (None, stream), "one communicator on two streams"
        self.stream = stream

    def exchange(self, messages):
        """All of a group at once. As on GPUs, a send ends when it is received, and a rank's next group begins when this
        one has ended; of one rank's, the first message is the first that is received."""
        sends = [self.comm.Issend(_vector(m.address, m.count, m.dtype), m.peer, m.dtype) for m in messages if m.sent]
        for m in messages:
            if not m.sent:
                self._receive(m)
        _within_patience(lambda: MPI.Request.Testall(sends), "a send that nobody receives")

    def _receive(self, expected):
        status = MPI.Status()
        announced = _within_patience(
            lambda: self.comm.Improbe(expected.peer, status=status), f"a receive: rank {expected.peer} sends nothing"
        )
        values = np.empty(status.Get_count(MPI.BYTE), np.uint8)
        announced.Recv(values)
        content = len(values) // ctypes.sizeof(C_TYPES[status.tag]), status.tag
        assert content == expected.content, f"rank {expected.peer} sends {content}, expected {expected.content}"
        _vector(expected.address, expected.count, expected.dtype).view(np.uint8)[:] = values


class Message(NamedTuple):
    peer: int
    address: int
    count: int
    dtype: int
    sent: bool

    @property
    def content(self):
        return self.count, self.dtype


class Group:
    """What is between groupStart and groupEnd. Collectives, which ranks may give in any order, are in one here."""

    depth, messages = 0, {}

    @classmethod
    def start(cls):
        assert cls.depth == 0
        cls.depth = 1

    @classmethod
    def end(cls):
        assert cls.depth == 1
        cls.depth = 0
        for communicator, messages in cls.messages.items():
            stream_at(communicator.stream).add(partial(communicator.exchange, messages))
        cls.messages = {}


def _within_patience(poll, what):
    """What poll() gives, once it gives something."""
    pauses, deadline = Pauses(), time.monotonic() + PATIENCE_S
    while not (found := poll()):
        assert time.monotonic() < deadline, f"this would hang: {what}"
        pauses.sleep()
    return found


def get_unique_id():
    """NCCL's holds the address of the process that made it; here its rank."""
    return struct.pack("i", MPI.COMM_WORLD.rank) + np.random.default_rng().bytes(UNIQUE_ID_BYTES - 4)


def members(size, unique_id, rank):
    """The communicator of the ranks that come with this id: they tell the one that made it who they are."""
    world, (maker,) = MPI.COMM_WORLD, struct.unpack_from("i", unique_id)
    assert len(unique_id) == UNIQUE_ID_BYTES
    own = world.isend((unique_id, rank), maker, MEETING)
    if world.rank == maker:
        ranks = {}
        for _ in range(size):
            status = MPI.Status()
            other_id, place = world.recv(tag=MEETING, status=status)
            assert other_id == unique_id, "one id for all"
            ranks[place] = status.source
        assert sorted(ranks) == list(range(size))
        in_order = [ranks[place] for place in range(size)]
        told = [world.isend(in_order, other, MEETING + 1) for other in in_order]
    in_order = world.recv(source=maker, tag=MEETING + 1)
    MPI.Request.waitall([own, *(told if world.rank == maker else [])])
    return world.Create_group(world.group.Incl(in_order))


def _vector(address, count, dtype=FLOAT32):
    return np.ctypeslib.as_array((C_TYPES[dtype] * count).from_address(address))


def module(available):
    if not available:
        return SimpleNamespace(available=False)
    return SimpleNamespace(
        available=True, NCCL_FLOAT32=FLOAT32, NCCL_BFLOAT16=BFLOAT16, NCCL_SUM=SUM, NCCL_MAX=MAX,
        NcclCommunicator=NcclCommunicator, get_unique_id=get_unique_id,
        groupStart=Group.start, groupEnd=Group.end,
    )  # fmt: skip
