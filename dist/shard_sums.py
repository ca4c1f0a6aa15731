"""Sums over the tp ranks of a pipeline stage, which hold shards of the same tensors and partial sums of the same rows.

Groups within a node use shared memory, groups across nodes messages (`new_shard_sums` chooses). Each sum is computed
once, or in the same order by all ranks, so all ranks and all runs get the same bits. Arrays are float32 and
C-contiguous. All tp ranks make the same calls in the same order.
"""

import itertools
from math import prod

import numpy as np

from dist.buffers import host_zeros
from dist.host import host_ring
from dist.node_memory import NodeMemory, check_room
from dist.ranges import cut
from dist.waiting import barrier, wait_nearby
from dist.wire import WireFormat
from dist.world import World

SMALL = 1 << 14  # elements: every rank adds up to this many itself, which saves a synchronization


def new_shard_sums(shards_world: World, elements: int, phase) -> "ShardSums":
    """Make the sums of a group, for rows of at most `elements`. Collective over the job, which ends if memory is short.

    phase(name, bytes): a context manager around each call's work (Tracer.interruption).
    """
    kind = SharedMemorySums if shards_world.local_size == shards_world.size else RingSums
    own_bytes = kind.shared_bytes(shards_world, elements)
    check_room(shards_world, own_bytes, "the sums over parts of tensors", ", or train with a smaller --tensor-parallel")
    sums = kind(shards_world, elements, phase)
    barrier(shards_world.job.local_comm)
    return sums


class ShardSums:
    """Base class of both kinds: their common methods, which are timed."""

    def __init__(self, shards_world: World, elements: int, phase):
        self.rank = shards_world.rank
        self.size = shards_world.size
        self.elements = elements
        self._phase = phase

    def share(self, count: int) -> tuple[int, int]:
        """Return [start, stop) of this tp rank's share of `count` elements."""
        return cut(count, self.size)[self.rank]

    def sum(self, rows: np.ndarray) -> np.ndarray:
        """Return the sum of rows (N, C) over the tp ranks, valid until the next such call; the rows stay unchanged.

        Rows (N,) are replaced by the sum and returned.
        """
        with self._phase("tensor", rows.nbytes):
            return self._combine(np.add, rows) if rows.ndim == 1 else self._sum_rows(self._fitting(rows))

    def maximum(self, rows: np.ndarray) -> np.ndarray:
        """Replace rows (N,) by the maximum over the tp ranks, element by element, and return them."""
        with self._phase("tensor", rows.nbytes):
            return self._combine(np.maximum, rows)

    def broadcast(self, arrays: list[np.ndarray]) -> None:
        """Replace the arrays of all tp ranks by those of tp rank 0."""
        with self._phase("lend", sum(array.nbytes for array in arrays)):
            packed = np.concatenate([array.reshape(-1) for array in arrays])
            self._broadcast(packed)
            if self.rank > 0:
                stops = np.cumsum([array.size for array in arrays])
                for array, values in zip(arrays, np.split(packed, stops[:-1]), strict=True):
                    array.reshape(-1)[:] = values

    def join(self, rows: np.ndarray) -> np.ndarray:
        """Gather rows, of which each tp rank has filled its `share` (of rows.reshape(-1)), in place."""
        with self._phase("tensor", rows.nbytes):
            self._join(self._fitting(rows).reshape(-1))
        return rows

    def _fitting(self, rows):
        if rows.size > self.elements:
            raise ValueError(f"rows of {rows.size} elements, expected at most {self.elements}: make room for as many")
        return rows


class SharedMemorySums(ShardSums):
    """Sums in the node's shared memory. Collective.

    All ranks share one sum. Each writes its partial sums into its own buffer (`room`). When all have written, each adds
    up an equal share, in the order of the tp ranks. When all shares are done, all use the sum in place. One buffer is
    enough: it is rewritten after the second synchronization, the sum after the next call's first.

    Small data (rows (N,), broadcasts) goes in pieces through two small buffers per rank, in turn. One synchronization
    per piece is enough: a rank that arrives at the next one has read the last piece. `room` and sum do not change.
    """

    def __init__(self, shards_world: World, elements: int, phase):
        super().__init__(shards_world, elements, phase)
        self._memory = NodeMemory(shards_world.local_comm)
        everything = self._memory.share(self.shared_bytes(shards_world, elements) // 4)
        self._small_rooms = [[own[turn * SMALL :][:SMALL] for own in everything] for turn in range(2)]
        self._turn = 0
        self._rooms = [own[2 * SMALL :][:elements] for own in everything]
        self._sum = everything[0][2 * SMALL + elements :]
        self._small_sum = np.zeros(SMALL, np.float32)
        barrier(shards_world.local_comm)

    @staticmethod
    def shared_bytes(shards_world: World, elements: int) -> int:
        """Return the bytes of shared memory that this rank allocates; the first rank also allocates the sum."""
        return 4 * (2 * SMALL + elements * (2 if shards_world.rank == 0 else 1))

    def room(self, shape: tuple[int, ...]) -> np.ndarray:
        """Return this rank's buffer for partial sums, which `sum` uses without a copy."""
        return self._rooms[self.rank][: prod(shape)].reshape(shape)

    def close(self) -> None:
        """Free the memory; buffers and sums must not be used any more. Collective over the group."""
        self._small_rooms = self._rooms = self._sum = None
        self._memory.close()

    def _sum_rows(self, rows):
        if rows.size <= SMALL:
            total = self._small_sum[: rows.size]
            self._combine_small(np.add, rows.reshape(-1), total)
            return total.reshape(rows.shape)
        room = self._rooms[self.rank]
        if rows.ctypes.data != room.ctypes.data:
            room[: rows.size] = rows.reshape(-1)
        self._meet()
        start, stop = self.share(rows.size)
        _combined(np.add, [room[start:stop] for room in self._rooms], self._sum[start:stop])
        self._meet()
        return self._sum[: rows.size].reshape(rows.shape)

    def _combine(self, function, rows):
        for piece in _small_pieces(rows):
            self._combine_small(function, piece, piece)
        return rows

    def _combine_small(self, function, piece, out):
        rooms = self._next_small_rooms()
        rooms[self.rank][: len(piece)] = piece
        self._meet()
        _combined(function, [room[: len(piece)] for room in rooms], out)

    def _broadcast(self, flat):
        for piece in _small_pieces(flat):
            room = self._next_small_rooms()[0][: len(piece)]
            if self.rank == 0:
                room[:] = piece
            self._meet()
            piece[:] = room

    def _join(self, flat):
        shares = cut(len(flat), self.size)
        own = slice(*shares[self.rank])
        self._rooms[self.rank][own] = flat[own]
        self._meet()
        for rank, (start, stop) in enumerate(shares):
            if rank != self.rank:
                flat[start:stop] = self._rooms[rank][start:stop]
        self._meet()

    def _next_small_rooms(self):
        self._turn = 1 - self._turn
        return self._small_rooms[self._turn]

    def _meet(self):
        """Wait for all tp ranks, and see what they wrote."""
        wait_nearby(self._memory.meet())


class RingSums(ShardSums):
    """Sums by messages, across nodes: rows around a ring (host/host_ring.py), small data by MPI's collectives.

    No one else may use shards_world's communicator.
    """

    def __init__(self, shards_world: World, elements: int, phase):
        super().__init__(shards_world, elements, phase)
        self._comm = shards_world.comm
        self._wire = WireFormat().new(elements)
        self._tags = itertools.cycle((1, 2))
        self._room = host_zeros(elements)
        self._sum = host_zeros(elements)

    @staticmethod
    def shared_bytes(shards_world: World, elements: int) -> int:
        return 0

    def room(self, shape: tuple[int, ...]) -> np.ndarray:
        """Return a buffer for partial sums."""
        return self._room[: prod(shape)].reshape(shape)

    def close(self) -> None:
        """Do nothing: no memory is shared."""

    def _sum_rows(self, rows):
        total = self._sum[: rows.size]
        total[:] = rows.reshape(-1)
        self._finish(host_ring.allreduce(self._comm, total, (), 0, len(total), self._wire, next(self._tags)))
        return total.reshape(rows.shape)

    def _combine(self, function, rows):
        gathered = np.empty((self.size, len(rows)), rows.dtype)
        wait_nearby(self._comm.Iallgather(rows.copy(), gathered))
        _combined(function, list(gathered), rows)
        return rows

    def _broadcast(self, flat):
        wait_nearby(self._comm.Ibcast(flat, root=0))

    def _join(self, flat):
        self._finish(host_ring.all_gather(self._comm, flat, 0, len(flat), self._wire, next(self._tags)))

    def _finish(self, exchange):
        for request in exchange:
            wait_nearby(request)


def _combined(function, addends: list[np.ndarray], out: np.ndarray) -> None:
    """Combine the addends in their order into out, which must not be one of them."""
    if len(addends) == 1:
        out[:] = addends[0]
        return
    function(addends[0], addends[1], out=out)
    for addend in addends[2:]:
        function(out, addend, out=out)


def _small_pieces(flat: np.ndarray) -> list[np.ndarray]:
    return [flat[start : start + SMALL] for start in range(0, len(flat), SMALL)]
