"""Sums over the tp ranks of a pipeline stage, which hold shards of the same tensors and partial sums of the same rows.

Within a node they use shared memory, across nodes messages (`new_parts` chooses). Each sum is made once, or in the same
order by all: the same bits on all ranks, and in every run. Arrays are float32 and C-contiguous. All tp ranks make the
same calls in the same order.
"""

import itertools
from math import prod

import numpy as np

from dist.buffers import host_zeros
from dist.host import host_ring
from dist.node_memory import NodeMemory, check_room
from dist.ranges import cut
from dist.waiting import barrier, nothing, wait_nearby
from dist.wire import WireFormat
from dist.world import World

SMALL = 1 << 14  # elements: every rank adds up to this many itself, which saves a synchronization


def new_parts(parts_world: World, elements: int, phase, progress=nothing) -> "SharedParts | RingParts":
    """Make a group for rows of at most `elements`. Collective over the job, which ends if memory is short.

    phase(name, bytes): a context manager around each call's work (Tracer.interruption). progress(), also an attribute,
    is called while a rank waits.
    """
    kind = SharedParts if parts_world.local_size == parts_world.size else RingParts
    own_bytes = kind.shared_bytes(parts_world, elements)
    check_room(parts_world, own_bytes, "the sums over parts of tensors", ", or train with a smaller --tensor-parallel")
    parts = kind(parts_world, elements, phase, progress)
    barrier(parts_world.job.local_comm)
    return parts


class TensorGroup:
    """Base class of both kinds: their calls, and how they are timed."""

    def __init__(self, parts_world: World, elements: int, phase, progress=nothing):
        self.rank, self.size, self.elements = parts_world.rank, parts_world.size, elements
        self._phase, self.progress = phase, progress

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

    def lend(self, arrays: list[np.ndarray]) -> None:
        """Replace the arrays of all tp ranks by those of tp rank 0."""
        with self._phase("lend", sum(array.nbytes for array in arrays)):
            self._lend([array.reshape(-1) for array in arrays])

    def join(self, rows: np.ndarray) -> np.ndarray:
        """Gather rows, of which each tp rank has filled its `share` (of rows.reshape(-1)), in place."""
        with self._phase("tensor", rows.nbytes):
            self._join(self._fitting(rows).reshape(-1))
        return rows

    def _fitting(self, rows):
        if rows.size > self.elements:
            raise ValueError(f"rows of {rows.size} elements, expected at most {self.elements}: make parts for as many")
        return rows


class SharedParts(TensorGroup):
    """In memory that the ranks' node shares. Collective.

    Each rank has a room, and all have one sum. Each writes its partial rows into its room. When all have, each adds up
    an equal share, in the order of the tp ranks. When all shares are done, all use the sum in place. One room is
    enough: rooms are rewritten after the second synchronization, the sum after the next call's first.

    Small data (rows (N,), replicated arrays) goes through two small rooms per rank in turn, in pieces. One
    synchronization per piece is enough: a rank that comes to the next has read the last. Room and sum stay unchanged.
    """

    def __init__(self, parts_world: World, elements: int, phase, progress=nothing):
        super().__init__(parts_world, elements, phase, progress)
        if parts_world.local_size != self.size:
            raise ValueError(
                f"{parts_world.local_size} of {self.size} parts on this node, expected all: take RingParts"
            )
        self._memory, self._meetings, self._turn = NodeMemory(parts_world.local_comm), 0, 0
        everything = self._memory.share(self.shared_bytes(parts_world, elements) // 4)
        self._small_rooms = [[own[turn * SMALL :][:SMALL] for own in everything] for turn in range(2)]
        self._rooms = [own[2 * SMALL :][:elements] for own in everything]
        self._sum, self._small_sum = everything[0][2 * SMALL + elements :], np.zeros(SMALL, np.float32)
        self._room_address = _address(self._rooms[self.rank])
        barrier(parts_world.local_comm)

    @staticmethod
    def shared_bytes(parts_world: World, elements: int) -> int:
        """Return the bytes of shared memory that this rank makes; the first rank also makes the sum."""
        return 4 * (2 * SMALL + elements * (2 if parts_world.rank == 0 else 1))

    def room(self, shape: tuple[int, ...]) -> np.ndarray:
        """Return this rank's room: partial rows that the caller writes there need no copy."""
        return self._rooms[self.rank][: prod(shape)].reshape(shape)

    def close(self) -> None:
        """Free the memory; rooms and sums must not be used any more. Collective over the group."""
        self._small_rooms = self._rooms = self._sum = None
        self._memory.close()

    def _sum_rows(self, rows):
        if rows.size <= SMALL:
            total = self._small_sum[: rows.size]
            self._combine_small(np.add, rows.reshape(-1), total)
            return total.reshape(rows.shape)
        if _address(rows) != self._room_address:
            self._rooms[self.rank][: rows.size] = rows.reshape(-1)
        self._meet()
        start, stop = self.share(rows.size)
        _combined(np.add, [room[start:stop] for room in self._rooms], self._sum[start:stop])
        self._meet()
        return self._sum[: rows.size].reshape(rows.shape)

    def _combine(self, function, rows):
        for start in range(0, len(rows), SMALL):
            piece = rows[start : start + SMALL]
            self._combine_small(function, piece, piece)
        return rows

    def _combine_small(self, function, piece, out):
        rooms = self._next_small_rooms()
        rooms[self.rank][: len(piece)] = piece
        self._meet()
        _combined(function, [room[: len(piece)] for room in rooms], out)

    def _lend(self, arrays):
        for pieces in _packed(arrays, SMALL):
            lent = _side_by_side(self._next_small_rooms()[0], pieces)
            if self.rank == 0:
                _copy(pieces, lent)
            self._meet()
            if self.rank > 0:
                _copy(lent, pieces)

    def _join(self, flat):
        shares = cut(len(flat), self.size)
        own = slice(*shares[self.rank])
        self._rooms[self.rank][own] = flat[own]
        self._meet()
        for part, (start, stop) in enumerate(shares):
            if part != self.rank:
                flat[start:stop] = self._rooms[part][start:stop]
        self._meet()

    def _next_small_rooms(self):
        self._turn = 1 - self._turn
        return self._small_rooms[self._turn]

    def _meet(self):
        """Wait for all tp ranks, and see what they wrote."""
        self._memory.arrive()
        self._meetings += 1
        wait_nearby(self._memory.arrived(range(self.size), self._meetings), self.progress)


class RingParts(TensorGroup):
    """By messages, if the group spans nodes: rows around a ring (host/host_ring.py), small data by MPI's collectives.

    No one else may use parts_world's communicator.
    """

    def __init__(self, parts_world: World, elements: int, phase, progress=nothing):
        super().__init__(parts_world, elements, phase, progress)
        self._comm, self._wire, self._tags = parts_world.comm, WireFormat().new(elements), itertools.cycle((1, 2))
        self._room, self._sum = host_zeros(elements), host_zeros(elements)

    @staticmethod
    def shared_bytes(parts_world: World, elements: int) -> int:
        return 0

    def room(self, shape: tuple[int, ...]) -> np.ndarray:
        """Return room for partial rows."""
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
        wait_nearby(self._comm.Iallgather(rows.copy(), gathered), self.progress)
        _combined(function, list(gathered), rows)
        return rows

    def _lend(self, arrays):
        packed = np.empty(sum(map(len, arrays)), np.float32)
        lent = _side_by_side(packed, arrays)
        if self.rank == 0:
            _copy(arrays, lent)
        wait_nearby(self._comm.Ibcast(packed, root=0), self.progress)
        if self.rank > 0:
            _copy(lent, arrays)

    def _join(self, flat):
        self._finish(host_ring.all_gather(self._comm, flat, 0, len(flat), self._wire, next(self._tags)))

    def _finish(self, exchange):
        for request in exchange:
            wait_nearby(request, self.progress)


def _combined(function, addends: list[np.ndarray], out: np.ndarray) -> None:
    """Combine the addends in their order into out, which is none of them."""
    if len(addends) == 1:
        out[:] = addends[0]
        return
    function(addends[0], addends[1], out=out)
    for addend in addends[2:]:
        function(out, addend, out=out)


def _copy(sources, targets) -> None:
    for source, target in zip(sources, targets, strict=True):
        target[:] = source


def _side_by_side(memory, arrays) -> list[np.ndarray]:
    """Return views for these arrays, side by side at the beginning of a memory."""
    stops = itertools.accumulate(map(len, arrays))
    return [memory[stop - len(array) : stop] for array, stop in zip(arrays, stops, strict=True)]


def _packed(arrays, most: int):
    """Yield lists of the arrays in order, cut where needed, with at most `most` elements per list."""
    pieces, left = [], most
    for array in arrays:
        while len(array):
            piece, array = array[:left], array[left:]
            pieces.append(piece)
            left -= len(piece)
            if left == 0:
                yield pieces
                pieces, left = [], most
    if pieces:
        yield pieces


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]
