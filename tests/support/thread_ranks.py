"""Ranks that are threads of this process, with as much of MPI as exchanges and strategies use, all of it late.

What nonblocking calls do is late_mpi.py's. Blocking collectives are made of one another: each gathers what the ranks
give, and sums have the ranks' order.
"""

import threading
import time
from functools import reduce
from operator import itemgetter

import numpy as np

from dist.mpi import MPI
from dist.node_memory import NodeMemory
from dist.waiting import Condition, wait
from dist.wire import BFLOAT16
from dist.world import world_of
from tests.support.late_mpi import Late

HANGS_S = 30


def run_ranks(nodes: list[int], program, seed: int = 0, most: int = 0, slow: int | None = None) -> list:
    """program(world) on every rank, at the same time: what each returned. nodes: how many ranks each node has.

    most: how many tests a request may take (late_mpi.py); of rank `slow`, ten times as many.
    """
    post = Post(sum(nodes), seed, most, slow)
    node_of = np.repeat(np.arange(len(nodes)), nodes).tolist()

    def rank(comm):
        return program(world_of(comm, comm.Split(node_of[comm.rank], comm.rank)))

    # Daemons, and not a pool: nobody waits for those that hang.
    results = [None] * len(post.lates)
    threads = [threading.Thread(target=post.guarded, args=(rank, comm, results), daemon=True) for comm in post.comms()]
    deadline = time.monotonic() + HANGS_S
    for thread in threads:
        thread.start()
    for number, thread in enumerate(threads):
        thread.join(max(0.0, deadline - time.monotonic()))
        assert post.error or not thread.is_alive(), f"rank {number} hangs"
    if post.error is not None:
        raise post.error
    return results


class Post:
    """What lies between the ranks: messages and what they gather."""

    def __init__(self, ranks: int, seed: int, most: int = 6, slow: int | None = None):
        self.lates = [Late(seed * ranks + rank, most * (10 if rank == slow else 1)) for rank in range(ranks)]
        self.error, self._lock = None, threading.Lock()
        self._sent, self._received = {}, {}  # by (communicator, source, destination, tag): matched in their order
        self._gathered = {}  # by call: what each rank gave

    def comms(self) -> list["ThreadComm"]:
        everyone = list(range(len(self.lates)))
        return [ThreadComm(self, ("world",), everyone, rank) for rank in everyone]

    def guarded(self, rank, comm, results: list):
        """The first error ends all ranks: the others find it where they wait. To leave with open requests is one."""
        try:
            results[comm.rank] = rank(comm)
            self.lates[comm.rank].check_all_were_waited_for()
        except BaseException as error:
            self.error = self.error or error

    def check(self) -> None:
        if self.error is not None:
            raise RuntimeError("another rank has failed")

    def send(self, key, copy) -> "Half":
        return self._match(Half(self, copy), self._sent, self._received, key, sends=True)

    def receive(self, key, landing) -> "Half":
        return self._match(Half(self, landing), self._received, self._sent, key, sends=False)

    def _match(self, half, own, others, key, sends):
        """With the oldest of the other side's; where there is none it lies there until one comes."""
        with self._lock:
            if not others.get(key):
                own.setdefault(key, []).append(half)
                return half
            other = others[key].pop(0)
            source, destination = (half, other) if sends else (other, half)
            destination.buffer[...] = source.buffer
            half.is_matched = other.is_matched = True
            return half

    def gather(self, call, rank: int, ranks: int, value, *landing) -> "Gathering":
        with self._lock:
            values = self._gathered.setdefault(call, {})
            values[rank] = value
        return Gathering(self, values, ranks, *landing)


class Half:
    """One side of a message: complete when the other side is there."""

    def __init__(self, post: Post, buffer):
        self.buffer, self.is_matched, self._post = buffer, False, post

    def Test(self) -> bool:
        self._post.check()
        return self.is_matched


class Gathering:
    """A value of each rank: complete when all are there. landing: where joined(values) goes then, if anywhere."""

    def __init__(self, post: Post, values: dict, ranks: int, landing=None, joined=None):
        self._post, self._values, self._ranks, self._landing, self._joined = post, values, ranks, landing, joined

    def Test(self) -> bool:
        self._post.check()
        if len(self._values) < self._ranks:
            return False
        if self._landing is not None:
            self._landing.reshape(-1)[:] = self._joined(self.values())
        return True

    def values(self) -> list:
        return [self._values[rank] for rank in range(self._ranks)]


class ThreadComm:
    """members: the world's rank of each of its ranks."""

    def __init__(self, post: Post, name: tuple, members: list[int], rank: int):
        self._post, self._name, self._members, self.rank, self.size = post, name, members, rank, len(members)
        self._late, self._calls = post.lates[members[rank]], 0

    def check(self) -> None:
        self._post.check()

    def Dup(self):
        return ThreadComm(self._post, self._next_call(), self._members, self.rank)

    def Split(self, color=0, key=0):
        name, everyone = (*self._next_call(), color), self.allgather((color, key, self.rank))
        chosen = [
            rank for _, rank in sorted((other_key, rank) for other, other_key, rank in everyone if other == color)
        ]
        return ThreadComm(self._post, name, [self._members[rank] for rank in chosen], chosen.index(self.rank))

    def Isend(self, buffer, dest, tag=0):
        key = self._name, self.rank, dest, tag
        return self._late.send(buffer, lambda copy: self._post.send(key, copy), f"send {key}")

    def Irecv(self, buffer, source, tag=0):
        key = self._name, source, self.rank, tag
        return self._late.receive(buffer, lambda landing: self._post.receive(key, landing), f"receive {key}")

    def Iallgather(self, sent, received):
        def start(copy, landing):
            return self._gather(copy, landing, np.concatenate)

        return self._late.collective(sent, received, start, "Iallgather")

    def Ireduce(self, sent, received, op=None, root=0):
        own = received if sent is MPI.IN_PLACE else sent
        return self._late.collective(own, received, lambda copy, landing: self._gather(copy, landing, added), "Ireduce")

    def Ibcast(self, buffer, root=0):
        if self.rank == root:
            return self._late.send(buffer, self._gather, f"Ibcast from {root}")
        roots_own = itemgetter(root)
        return self._late.receive(buffer, lambda landing: self._gather(None, landing, roots_own), f"Ibcast from {root}")

    def Ibarrier(self):
        return self._late.none(self._gather(None), "Ibarrier")

    def allgather(self, value):
        gathering = self._gather(value)
        wait(gathering)
        return gathering.values()

    def bcast(self, value=None, root=0):
        return self.allgather(value)[root]

    def allreduce(self, value, op=None):
        return min(self.allgather(value)) if op == MPI.MIN else sum(self.allgather(value))

    def Barrier(self):
        self.allgather(None)

    def Bcast(self, buffer, root=0):
        buffer[:] = self.allgather(buffer.copy())[root]

    def Allreduce(self, in_place, buffer, op=None):
        assert in_place is MPI.IN_PLACE
        buffer[:] = added(self.allgather(buffer.copy()))

    def Reduce(self, sent, received, op=None, root=0):
        total = added(self.allgather((received if sent is MPI.IN_PLACE else sent).copy()))
        if self.rank == root:
            received[:] = total

    def Reduce_scatter_block(self, sent, received, op=None):
        received[:] = added(self.allgather(sent.copy()))[self.rank * len(received) :][: len(received)]

    def Allgather(self, in_place, buffer):
        assert in_place is MPI.IN_PLACE
        block = len(buffer) // self.size
        buffer[:] = np.concatenate(self.allgather(buffer[self.rank * block :][:block].copy()))

    def _gather(self, value, *landing) -> Gathering:
        return self._post.gather(self._next_call(), self.rank, self.size, value, *landing)

    def _next_call(self) -> tuple:
        """All ranks make their collective calls in one order."""
        self._calls += 1
        return (*self._name, self._calls)


def added(arrays: list[np.ndarray]) -> np.ndarray:
    """Their sum; of bfloat16's bits too, where each partial sum is rounded."""
    if arrays[0].dtype != np.uint16:
        return sum(arrays)
    return reduce(np.add, [each.view(BFLOAT16) for each in arrays]).view(np.uint16)


def share_in_process(memory: NodeMemory, count: int, dtype=np.float32) -> list[np.ndarray]:
    """In the place of NodeMemory.share, for ranks that share all memory."""
    return memory._local_comm.allgather(np.zeros(count, dtype))


def ending_with_others(arrived):
    """NodeMemory.arrived of ranks that look, while they wait, whether another rank has failed."""

    def watched(memory, local_ranks, count):
        condition = arrived(memory, local_ranks, count)

        def holds():
            memory._local_comm.check()
            return condition.Test()

        return Condition(holds)

    return watched


def share_memory(monkeypatch) -> None:
    """From here on, and to the end of a test, what a node's ranks share is of this process."""
    monkeypatch.setattr(NodeMemory, "share", share_in_process)
    monkeypatch.setattr(NodeMemory, "arrived", ending_with_others(NodeMemory.arrived))
