"""The rows of a table that the ranks of a node look up in a step: which, their parameters, and then their gradients.

They are few beside the table's, and lie in an array of their own, a row for each in the order of their numbers (ids):
first the parameters, which have come before those of the table, and from the first backward on the gradients, apart
from those that the table has by other uses.
"""

import numpy as np

NEXT = 1  # step


class LookedUp:
    """Of a table (rows, width) float32: `shape`. memory: (ids, values) of each rank of the node, this rank's being
    number `own`: ids int32 (2, 1 + most), of this step and of the next one in turns, each behind their count; values
    float32 (most, width).

    All ranks of a node call `begin` as a step begins. What others have written may be read from the moment when all of
    them have met after backward (`union`, `sums`, `next_rows`) to the next `begin`.

    fetched: whether the parameters of the next step's rows are brought into `values`; whoever brings them says so.
    """

    def __init__(self, shape: tuple[int, int], memory: list, own: int = 0):
        self.shape, self._memory, self._own, self._turn = shape, memory, own, 0
        self.fetched, self.has_parameters = False, False

    def begin(self, ids: np.ndarray, next_ids: np.ndarray) -> None:
        """A step begins that looks up these rows, sorted, each once; the next one looks up next_ids."""
        self._turn = 1 - self._turn
        self.has_parameters = self.fetched and np.array_equal(self._ids(self._own), ids)
        self.fetched = False
        self._note(ids, 0)
        self._note(next_ids, NEXT)

    def begin_gradients(self) -> None:
        """From now on `values` are the gradients: 0 so far."""
        self.has_parameters = False
        self.values[:] = 0.0

    @property
    def values(self) -> np.ndarray:
        """(rows of this step, width): this rank's."""
        return self._memory[self._own][1][: len(self._ids(self._own))]

    @property
    def nbytes(self) -> int:
        """Of this rank's rows, with their ids."""
        return self._nbytes(0)

    @property
    def next_nbytes(self) -> int:
        """Of those of the next step."""
        return self._nbytes(NEXT)

    def _nbytes(self, ahead: int) -> int:
        count = len(self._ids(self._own, ahead))
        return count * (self.values.itemsize * self.shape[1] + np.dtype(np.int32).itemsize)

    def numbers(self, ids: np.ndarray) -> np.ndarray:
        """Where each of these ids, all of this step, has its row in `values`."""
        return np.searchsorted(self._ids(self._own), ids)

    def union(self) -> np.ndarray:
        """The ids of all ranks of the node, sorted."""
        return np.unique(np.concatenate([self._ids(rank) for rank in range(len(self._memory))]))

    def sum_into(self, ids: np.ndarray, rows: np.ndarray) -> None:
        """rows (n, width): the node's sums of the gradients of these rows, added in the order of its ranks."""
        rows[:] = 0.0
        for rank, (_, values) in enumerate(self._memory):
            low, high = np.searchsorted(self._ids(rank), (ids[0], ids[-1] + 1))
            own, places = common(self._ids(rank)[low:high], ids)
            rows[places] += values[low + own]

    def next_rows(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """(sorted ids, values) of each rank of the node: where the next step's parameters go."""
        ids = [self._ids(rank, NEXT) for rank in range(len(self._memory))]
        return [(own, values[: len(own)]) for own, (_, values) in zip(ids, self._memory, strict=True)]

    def _note(self, ids: np.ndarray, ahead: int) -> None:
        room = self._memory[self._own][0][(self._turn + ahead) % 2]
        room[1 : 1 + len(ids)] = ids
        room[0] = len(ids)

    def _ids(self, rank: int, ahead: int = 0) -> np.ndarray:
        room = self._memory[rank][0][(self._turn + ahead) % 2]
        return room[1 : 1 + room[0]]


def common(some: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the ids that both have, each sorted, stand in the one and in the other."""
    _, own, places = np.intersect1d(some, others, assume_unique=True, return_indices=True)
    return own, places


def ids_and_values(most: int, width: int, zeros) -> list[tuple[np.ndarray, np.ndarray]]:
    """The memory of each rank of the node. zeros(count, dtype) makes this rank's, and gives that of each."""
    ids, values = zeros(2 * (1 + most), np.int32), zeros(most * width, np.float32)
    return [(i.reshape(2, -1), v.reshape(-1, width)) for i, v in zip(ids, values, strict=True)]
