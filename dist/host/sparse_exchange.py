"""Exchange of a sparse embedding gradient, and of the rows' parameters, among ranks in host memory.

Each rank owns stretches of the flat table, which may begin and end within a row. An owner gets only rows of which it
owns at least a part:

    to_owners   each node sends its sums of gradients to the owners, which add them to the table's gradient
    everywhere  the same, and then the owners send their rows to all ranks
    fetch       each node asks the owners for rows of parameters

An owner computes each sum once, in a fixed order, so all ranks and all runs get the same bits. Rows are few, and travel
as float32 whatever the wire format. First all ranks announce which rows follow. Then rows travel in rounds: in each, a
rank sends to one rank and receives from one. Segments of rows are made and added one at a time, so there is never a
second copy of all rows. Written as generators (progress_engine.py).
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator

import numpy as np

from dist.sparse_gradient import SparseGradient, common

TAG = 1  # one is enough: messages between two ranks arrive in order
SEGMENT_BYTES = 1 << 18  # of rows
AHEAD = 2  # segments under way in each direction


class SparseExchange:
    """Exchanges the rows of `sparse` that the nodes of comm's ranks look up. Collective.

    stretches: ((start, stop), owner) of the flat table, in any order. One exchange is under way at a time. `flat`
    begins with the table: gradients for to_owners and everywhere, parameters for fetch.
    """

    def __init__(self, comm, sparse: SparseGradient, stretches):
        self._comm = comm.Dup()
        self._sparse = sparse
        width = sparse.shape[1]
        self._owned = [Owned([part for part, owner in stretches if owner == rank], width) for rank in range(comm.size)]
        self._length = segment_rows(*sparse.shape)
        self._leaving, self._landing = (np.empty((AHEAD, self._length, width), np.float32) for _ in range(2))

    @property
    def own(self) -> list[tuple[int, int]]:
        """Return the stretches that this rank owns."""
        return self._owned[self._comm.rank].stretches

    def to_owners(self, flat):
        """Send rows to their owners, which add them. Return the ids that each rank has sent here."""
        table = self._table(flat)
        ids = self._sparse.union()
        parts = [owned.touched(ids) for owned in self._owned]
        told = yield from self._swap_ids(parts)

        def add(source, ids, rows):
            for places, columns in self._owned[self._comm.rank].pieces(ids):
                table[ids[places], columns] += rows[places, columns]

        yield from self._rounds(parts, told, self._sparse.sum_into, add)
        return told

    def everywhere(self, flat):
        told = yield from self.to_owners(flat)
        table = self._table(flat)
        ids = np.unique(np.concatenate(told))
        sums = yield from self._swap_ids([ids] * self._comm.size)

        def take(owner, ids, rows):
            for places, columns in self._owned[owner].pieces(ids):
                table[ids[places], columns] = rows[places, columns]

        yield from self._rounds([ids] * self._comm.size, sums, _rows_of(table), take)

    def fetch(self, flat, wanted: list[tuple[np.ndarray, np.ndarray]]):
        """Fetch rows of the table from their owners. wanted: (sorted ids, rows to fill) of each rank of this node."""
        ids = np.unique(np.concatenate([ids for ids, _ in wanted]))
        asked = [owned.touched(ids) for owned in self._owned]
        told = yield from self._swap_ids(asked)

        def take(owner, ids, rows):
            for places, columns in self._owned[owner].pieces(ids):
                for wanted_ids, wanted_rows in wanted:
                    own, at = common(ids[places], wanted_ids)
                    wanted_rows[at, columns] = rows[places[own], columns]

        yield from self._rounds(told, asked, _rows_of(self._table(flat)), take)

    def _table(self, flat):
        return flat[: self._sparse.shape[0] * self._sparse.shape[1]].reshape(self._sparse.shape)

    def _swap_ids(self, parts: list[np.ndarray]):
        """Return the ids that each rank has sent here, in the order of the ranks. parts: the ids for each rank."""
        counts = yield from self._swap([np.array([len(part)], np.int32) for part in parts], [1] * len(parts))
        return (yield from self._swap(parts, [int(count[0]) for count in counts]))

    def _swap(self, parts: list[np.ndarray], counts: list[int]):
        """Swap ids. counts: how many each rank sends here. This rank keeps its own."""
        come = [np.empty(count, np.int32) for count in counts]
        come[self._comm.rank] = parts[self._comm.rank]
        others = [rank for rank in range(self._comm.size) if rank != self._comm.rank]
        receives = [self._comm.Irecv(come[rank], rank, TAG) for rank in others if len(come[rank])]
        sends = [self._comm.Isend(parts[rank], rank, TAG) for rank in others if len(parts[rank])]
        yield from receives + sends
        return come

    def _rounds(self, leaving: list[np.ndarray], coming: list[np.ndarray], give, take):
        """Send each rank the rows of its `leaving` ids, and receive the rows of its `coming` ids; own rows first.

        give(ids, rows) fills the rows of some ids; take(source, ids, rows) uses them.
        """
        rank = self._comm.rank
        size = self._comm.size
        for ids in self._segments(leaving[rank]):
            rows = self._leaving[0, : len(ids)]
            give(ids, rows)
            take(rank, ids, rows)
        for step in range(1, size):
            to = (rank + step) % size
            source = (rank - step) % size
            yield from self._round(to, self._segments(leaving[to]), source, self._segments(coming[source]), give, take)

    def _round(self, to: int, leaving: list[np.ndarray], source: int, coming: list[np.ndarray], give, take):
        """Send and receive the segments of a round, at most AHEAD under way in each direction."""
        receives = deque()
        sends = deque()

        def receive(number):
            if number < len(coming):
                rows = self._landing[number % AHEAD, : len(coming[number])]
                receives.append((rows, self._comm.Irecv(rows, source, TAG)))

        for number in range(AHEAD):
            receive(number)
        for number in range(max(len(leaving), len(coming))):
            if number < len(leaving):
                if number >= AHEAD:
                    yield sends.popleft()
                rows = self._leaving[number % AHEAD, : len(leaving[number])]
                give(leaving[number], rows)
                sends.append(self._comm.Isend(rows, to, TAG))
            if number < len(coming):
                rows, request = receives.popleft()
                yield request
                take(source, coming[number], rows)
                receive(number + AHEAD)
        yield from sends

    def _segments(self, ids: np.ndarray) -> list[np.ndarray]:
        return [ids[first : first + self._length] for first in range(0, len(ids), self._length)]


class Owned:
    """The elements of a table's rows that a rank owns. stretches: (start, stop) of the flat table."""

    def __init__(self, stretches: list[tuple[int, int]], width: int):
        self.stretches = sorted(stretches)
        found = [box for part in self.stretches for box in boxes(*part, width)]
        whole = [(low, high) for low, high, columns in found if columns == slice(0, width)]
        self._whole = np.array(whole, np.int64).reshape(-1, 2)  # stretches of rows
        self._cut = sorted(
            (low, columns.start, columns.stop) for low, _, columns in found if columns != slice(0, width)
        )

    def touched(self, ids: np.ndarray) -> np.ndarray:
        """Return those of the sorted ids whose rows this rank owns at least in part."""
        is_touched = self._are_whole(ids)
        is_touched |= np.isin(ids, [row for row, *_ in self._cut])
        return ids[is_touched]

    def pieces(self, ids: np.ndarray) -> Iterator[tuple[np.ndarray, slice]]:
        """Yield (indices of sorted ids, the columns of these rows that the rank owns)."""
        yield np.flatnonzero(self._are_whole(ids)), slice(None)
        low, high = (bisect_left(self._cut, (row,)) for row in (ids[0], ids[-1] + 1))
        for row, start, stop in self._cut[low:high]:
            yield np.flatnonzero(ids == row), slice(start, stop)

    def _are_whole(self, ids: np.ndarray) -> np.ndarray:
        begun, ended = (np.searchsorted(edges, ids, "right") for edges in self._whole.T)
        return begun > ended


def boxes(start: int, stop: int, width: int) -> Iterator[tuple[int, int, slice]]:
    """Yield the boxes (first row, stop row, columns), at most three, of the stretch [start, stop) of a flat table."""
    first, begin = divmod(start, width)
    last, end = divmod(stop, width)
    if first == last:
        if begin < end:
            yield first, first + 1, slice(begin, end)
        return
    if begin:
        yield first, first + 1, slice(begin, width)
        first += 1
    if first < last:
        yield first, last, slice(0, width)
    if end:
        yield last, last + 1, slice(0, end)


def segment_rows(rows: int, width: int) -> int:
    """Return how many rows of a table one segment holds."""
    return min(rows, max(1, SEGMENT_BYTES // (4 * width)))


def segments_bytes(rows: int, width: int) -> int:
    """Return the bytes of an exchange's buffers: segments in both directions, and those being added."""
    return 4 * segment_rows(rows, width) * width * (2 * AHEAD + 2)


def _rows_of(table: np.ndarray):
    def give(ids, rows):
        np.take(table, ids, axis=0, out=rows, mode="clip")  # "clip" needs no second buffer; all ids are valid

    return give
