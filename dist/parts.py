"""Sums over the parts of a stage: the ranks that hold parts of the same tensors, and add up what each has of the rows.

In a node in memory that its ranks share, across nodes by messages (`new_parts` chooses). Either way each sum is made
once, or in the same order by everyone: the same bits on all ranks, and in every run. Arrays are float32, and
C-contiguous. All parts call the same in the same order.
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

SMALL = 1 << 14  # elements: so few are added by every rank for itself, which spares a meeting


def new_parts(parts_world: World, elements: int, phase, progress=nothing) -> "SharedParts | RingParts":
    """For rows of at most `elements`. Collective over the job: where the memory is too small it ends with one line.

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
    """What both kinds have in common: what is asked of them, and how it is timed."""

    def __init__(self, parts_world: World, elements: int, phase, progress=nothing):
        self.rank, self.size, self.elements = parts_world.rank, parts_world.size, elements
        self._phase, self.progress = phase, progress

    def share(self, count: int) -> tuple[int, int]:
        """[start, stop) of this part's share of `count` elements."""
        return cut(count, self.size)[self.rank]

    def sum(self, rows: np.ndarray) -> np.ndarray:
        """Rows (N, C): the sum over the parts, where it lies until the next such call; the rows stay as they are.

        Rows (N,): they become the sum, and are returned.
        """
        with self._phase("tensor", rows.nbytes):
            return self._combine(np.add, rows) if rows.ndim == 1 else self._sum_rows(self._fitting(rows))

    def maximum(self, rows: np.ndarray) -> np.ndarray:
        """Rows (N,) become the largest of all parts, element by element, and are returned."""
        with self._phase("tensor", rows.nbytes):
            return self._combine(np.maximum, rows)

    def lend(self, arrays: list[np.ndarray]) -> None:
        """The arrays of all parts become those of part 0."""
        with self._phase("lend", sum(array.nbytes for array in arrays)):
            self._lend([array.reshape(-1) for array in arrays])

    def join(self, rows: np.ndarray) -> np.ndarray:
        """Rows of which each part has filled its `share` (of rows.reshape(-1)): all parts get all of them, in place."""
        with self._phase("tensor", rows.nbytes):
            self._join(self._fitting(rows).reshape(-1))
        return rows

    def _fitting(self, rows):
        if rows.size > self.elements:
            raise ValueError(f"rows of {rows.size} elements, expected at most {self.elements}: make parts for as many")
        return rows


class SharedParts(TensorGroup):
    """In memory that the parts' node shares. Collective.

    Each rank has a room of its own, and all have one sum. Partial rows are written into the rooms; when all have come,
    each adds up an equal share of them, parts in their order; and when all shares are done, the sum is used where it
    lies. One room is enough: rooms are rewritten after the second meeting, the sum after the next call's first.

    What is small (rows (N,), lent arrays) goes through two small rooms a rank in turn, in pieces, where a meeting each
    is enough: who comes to the next has read the last. So it leaves the room and the sum as they are.
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
        """What this rank makes of the shared memory; the first also the sum."""
        return 4 * (2 * SMALL + elements * (2 if parts_world.rank == 0 else 1))

    def room(self, shape: tuple[int, ...]) -> np.ndarray:
        """This rank's room: partial rows that are written there need not be copied. It holds what was written."""
        return self._rooms[self.rank][: prod(shape)].reshape(shape)

    def close(self) -> None:
        """Give the memory back; rooms and sums must not be used any more. Collective over the parts."""
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
        """Return when all parts have come here, and see what they wrote."""
        self._memory.arrive()
        self._meetings += 1
        wait_nearby(self._memory.arrived(range(self.size), self._meetings), self.progress)


class RingParts(TensorGroup):
    """By messages, where parts lie on several nodes: rows around a ring (host/ring.py), what is small to everybody.

    Nobody else uses parts_world's communicator.
    """

    def __init__(self, parts_world: World, elements: int, phase, progress=nothing):
        super().__init__(parts_world, elements, phase, progress)
        self._comm, self._wire, self._tags = parts_world.comm, WireFormat().new(elements), itertools.cycle((1, 2))
        self._room, self._sum = host_zeros(elements), host_zeros(elements)

    @staticmethod
    def shared_bytes(parts_world: World, elements: int) -> int:
        return 0

    def room(self, shape: tuple[int, ...]) -> np.ndarray:
        """Where partial rows may be written."""
        return self._room[: prod(shape)].reshape(shape)

    def close(self) -> None:
        """Nothing is shared."""

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
    """out = the addends, combined in their order. out is none of them, but may be an array that one was copied from."""
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
    """Room for these arrays at the beginning of a memory."""
    stops = itertools.accumulate(map(len, arrays))
    return [memory[stop - len(array) : stop] for array, stop in zip(arrays, stops, strict=True)]


def _packed(arrays, most: int):
    """The arrays, in order and cut where need be, in lists of together at most so many elements."""
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
