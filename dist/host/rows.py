"""Rows of a table between those who look them up and those who own them, among ranks in host memory.

Each rank owns stretches of the flat table, which may begin and end within a row. To an owner go only the rows that it
has a part of:

    to_owners   each node's sums of gradients go to the owners, which add them up
    everywhere  the same, and the owners' sums go to all ranks
    fetch       owners are asked for rows of parameters, and give them

A sum is made once, by its owner, in the order of the ranks: the same bits in every run, and on all ranks. `everywhere`
moves (M-1)/M (R + U) rows into each of M ranks, R being those of one rank and U those of any. If each rank sent its
rows to all, these would be (M-1) R: less for two ranks, by a third at most, and more for many.

Rows travel as float32 whatever the wire's format: they are few, and nothing of them need be fed back. What goes first
between two ranks is how many rows follow. Written as generators (progress.py).
"""

from collections.abc import Iterator

import numpy as np

from dist.looked_up import LookedUp, added, common

TAG = 1  # messages between two ranks arrive in their order


class RowExchange:
    """Among the ranks of comm, the rows of `lookup`'s table that their nodes look up. Collective.

    stretches: ((start, stop), owner) of the flat table, in any order. One exchange is under way at a time.
    """

    def __init__(self, comm, lookup: LookedUp, stretches):
        self._comm, self._lookup, self._width = comm.Dup(), lookup, lookup.shape[1]
        self._owned = [sorted(part for part, owner in stretches if owner == rank) for rank in range(comm.size)]
        self._sums = [None] * comm.size

    @property
    def own(self) -> list[tuple[int, int]]:
        """The stretches that this rank owns."""
        return self._owned[self._comm.rank]

    def to_owners(self):
        ids = self._lookup.union()
        parts = [self._touched(ids, owner) for owner in range(self._comm.size)]
        told = yield from self._swap_ids(parts)
        rows = yield from self._swap([self._lookup.sums(part) for part in parts], [len(part) for part in told])
        ids = np.unique(np.concatenate(told))
        self._sums[self._comm.rank] = ids, added(list(zip(told, rows, strict=True)), ids, self._width)

    def everywhere(self):
        yield from self.to_owners()
        ids, rows = self._sums[self._comm.rank]
        told = yield from self._swap_ids([ids] * self._comm.size)
        sums = yield from self._swap([rows] * self._comm.size, [len(part) for part in told])
        self._sums = list(zip(told, sums, strict=True))

    def add_to(self, part_of) -> None:
        """Add the sums that are here to the gradients: part_of(start, stop) is the array of a stretch."""
        for parts, sums in zip(self._owned, self._sums, strict=True):
            for start, stop in parts if sums else ():
                for box in boxes(start, stop, self._width):
                    table, (ids, rows) = box.of(part_of(start, stop), start), sums
                    first, last = np.searchsorted(ids, (box.row, box.row + len(table)))
                    table[ids[first:last] - box.row] += rows[first:last, box.columns]
        self._sums = [None] * self._comm.size

    def fetch(self, flat, wanted: list[tuple[np.ndarray, np.ndarray]]):
        """Bring rows of the table, the beginning of `flat`, from their owners, where they are complete.

        wanted: (sorted ids, rows to be filled) as often as somebody of this node wants some.
        """
        table = flat[: self._lookup.shape[0] * self._width].reshape(self._lookup.shape)
        ids = np.unique(np.concatenate([ids for ids, _ in wanted]))
        asked = [self._touched(ids, owner) for owner in range(self._comm.size)]
        told = yield from self._swap_ids(asked)
        given = yield from self._swap([table[part] for part in told], [len(part) for part in asked])
        for parts, *answer in zip(self._owned, asked, given, strict=True):
            for box in (box for part in parts for box in boxes(*part, self._width)):
                for each in wanted:
                    _copy(box, *answer, *each)

    def _touched(self, ids: np.ndarray, owner: int) -> np.ndarray:
        """Those of the sorted ids whose rows the owner has a part of."""
        rows = [(start // self._width, -(-stop // self._width)) for start, stop in self._owned[owner]]
        places = np.searchsorted(ids, np.array(rows, ids.dtype).reshape(-1, 2))
        return np.unique(np.concatenate([ids[:0], *(ids[low:high] for low, high in places)]))

    def _swap_ids(self, parts: list[np.ndarray]):
        """Returns the ids that each rank has sent here, in the order of the ranks; parts: what goes to each."""
        counts = yield from self._swap([np.array([len(part)], np.int32) for part in parts], [1] * len(parts))
        return (yield from self._swap(parts, [int(count[0]) for count in counts]))

    def _swap(self, parts: list[np.ndarray], counts: list[int]):
        """The same of any arrays, of which so many rows come from each rank; this rank's own goes nowhere."""
        come = [np.empty((count, *part.shape[1:]), part.dtype) for part, count in zip(parts, counts, strict=True)]
        come[self._comm.rank] = parts[self._comm.rank]
        others = [rank for rank in range(self._comm.size) if rank != self._comm.rank]
        receives = [self._comm.Irecv(come[rank], rank, TAG) for rank in others if len(come[rank])]
        sends = [self._comm.Isend(parts[rank], rank, TAG) for rank in others if len(parts[rank])]
        yield from receives + sends
        return come


class Box:
    """Of some rows of a table, from number `row` on, the same columns, a slice: all of them, or those of one row."""

    def __init__(self, row: int, stop_row: int, width: int, start: int = 0, stop: int | None = None):
        self.row, self.stop_row, self._width = row, stop_row, width
        self.columns = slice(start, width if stop is None else stop)

    def of(self, array, start: int):
        """Its view (rows, columns) of a stretch of the flat table that begins at element `start`."""
        low, high = self.row * self._width + self.columns.start, (self.stop_row - 1) * self._width + self.columns.stop
        return array[low - start : high - start].reshape(self.stop_row - self.row, -1)


def boxes(start: int, stop: int, width: int) -> Iterator[Box]:
    """What the stretch [start, stop) of a flat table with rows of that width is made of: at most three."""
    (first, begin), (last, end) = divmod(start, width), divmod(stop, width)
    if first == last:
        if begin < end:
            yield Box(first, first + 1, width, begin, end)
        return
    if begin:
        yield Box(first, first + 1, width, begin)
        first += 1
    if first < last:
        yield Box(first, last, width)
    if end:
        yield Box(last, last + 1, width, 0, end)


def _copy(box: Box, ids, rows, wanted_ids, wanted_rows) -> None:
    """What the box has of these rows goes to where they are wanted; both by sorted ids."""
    first, last = np.searchsorted(ids, (box.row, box.stop_row))
    own, places = common(ids[first:last], wanted_ids)
    wanted_rows[places, box.columns] = rows[first + own, box.columns]
