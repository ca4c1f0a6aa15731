"""The sparse gradient of an embedding table: the rows that the ranks of a node look up in a step.

A step uses few rows of the table. They are kept in a separate array, sorted by row number (id). In forward the array
holds their parameters, which arrive before the rest of the table. From the first backward on it holds the gradients of
the look-up. The gradients of the table's other use, as the head, are in the gradient of the whole table.
"""

import numpy as np

NEXT = 1  # steps ahead


class SparseGradient:
    """Rows of a table of `shape` (rows, width), float32, at most `most` in a step.

    zeros(count, dtype): makes this rank's array, and returns those of all ranks of the node; this rank is number `own`.

    All ranks of a node call `begin` at the start of a step. They may read each other's rows (`union`, `sum_into`,
    `next_rows`) after they have met at the end of backward, until the next `begin`.

    A strategy that fetches the next step's parameters sets `fetched`. They have arrived when before_use returns.
    """

    def __init__(self, shape: tuple[int, int], most: int, zeros, own: int = 0):
        self.shape = shape
        # (ids, values) of each rank of the node. ids: int32 (2, 1 + most), the ids of this step and of the next, each
        # after its count; the two take turns. values: float32 (most, width).
        ids = [found.reshape(2, -1) for found in zeros(2 * (1 + most), np.int32)]
        values = [found.reshape(-1, shape[1]) for found in zeros(most * shape[1], np.float32)]
        self._memory = list(zip(ids, values, strict=True))
        self._own = own
        self._turn = 0
        self._row_bytes = 4 * shape[1] + 4  # float32 values, int32 id
        self.fetched = False
        self.has_parameters = False

    def begin(self, ids: np.ndarray, next_ids: np.ndarray) -> None:
        """Begin a step that looks up the rows `ids`, sorted and unique; the next step looks up next_ids."""
        self._turn = 1 - self._turn
        self.has_parameters = self.fetched and np.array_equal(self._ids(self._own), ids)
        self.fetched = False
        for ahead, noted in enumerate((ids, next_ids)):
            room = self._memory[self._own][0][(self._turn + ahead) % 2]
            room[0] = len(noted)
            room[1 : 1 + len(noted)] = noted

    def begin_gradients(self) -> None:
        """Use `values` for the gradients from now on, and zero them."""
        self.has_parameters = False
        self.values[:] = 0.0

    @property
    def values(self) -> np.ndarray:
        """This rank's rows of this step, (rows, width)."""
        return self._memory[self._own][1][: len(self._ids(self._own))]

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's rows of this step, with their ids."""
        return self._row_bytes * len(self._ids(self._own))

    @property
    def next_nbytes(self) -> int:
        """Bytes of this rank's rows of the next step, with their ids."""
        return self._row_bytes * len(self._ids(self._own, NEXT))

    def numbers(self, ids: np.ndarray) -> np.ndarray:
        """Return the index in `values` of each of these ids, all of which this step uses."""
        return np.searchsorted(self._ids(self._own), ids)

    def union(self) -> np.ndarray:
        """Return the ids of all ranks of the node, sorted."""
        return np.unique(np.concatenate([self._ids(rank) for rank in range(len(self._memory))]))

    def sum_into(self, ids: np.ndarray, rows: np.ndarray) -> None:
        """Sum the node's gradients of these rows into rows (n, width), in the order of the node's ranks."""
        rows[:] = 0.0
        for rank, (_, values) in enumerate(self._memory):
            low, high = np.searchsorted(self._ids(rank), (ids[0], ids[-1] + 1))
            own, places = common(self._ids(rank)[low:high], ids)
            rows[places] += values[low + own]

    def next_rows(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return (sorted ids, values) of each rank of the node: where the next step's parameters go."""
        ids = [self._ids(rank, NEXT) for rank in range(len(self._memory))]
        return [(own, values[: len(own)]) for own, (_, values) in zip(ids, self._memory, strict=True)]

    def _ids(self, rank: int, ahead: int = 0) -> np.ndarray:
        room = self._memory[rank][0][(self._turn + ahead) % 2]
        return room[1 : 1 + room[0]]


def common(some: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices, in each of two sorted arrays of ids, of the ids that are in both."""
    _, own, places = np.intersect1d(some, others, assume_unique=True, return_indices=True)
    return own, places
