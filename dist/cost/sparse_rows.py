"""The size of a sparse embedding gradient, and the messages of its exchange (dist/host/sparse_exchange.py).

Rows travel as float32 whatever the wire format, each with its number, an int32. The prediction asks all owners for
equally many rows, because each owns stretches all over the table. It ignores the few bytes that announce how many.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dist.cost.stages import Stage, leaders_of, stage

ELEMENT_BYTES = 4
ID_BYTES = 4
MOST_MEMBERS = 256
ASKING = 2  # dependent messages before the rounds of rows: how many rows, and which


@dataclass(frozen=True)
class Rows:
    """The number of distinct rows of `width` elements that a step uses: each rank (N,), each node (M,), all ranks."""

    width: int
    of_ranks: tuple[int, ...]
    of_nodes: tuple[int, ...]
    any: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row with its number."""
        return ELEMENT_BYTES * self.width + ID_BYTES

    def on(self, placement, times: float = 1.0) -> "Rows":
        """Estimate the rows of a batch `times` as large, on other ranks. placement: the node of each rank.

        The number of distinct words in a text grows as a power of its length (Heaps 1978). The exponent follows from
        the rows of one rank and of all ranks. Rows counted on a single rank are assumed to hold for all.
        """
        ranks = len(placement)
        alone = float(np.mean(self.of_ranks))
        before = len(self.of_ranks)
        power = math.log(self.any / alone) / math.log(before) if before > 1 else 0.0

        def used_by(share: float) -> int:
            return round(self.any * (times * share) ** power)

        of_nodes = tuple(used_by(count / ranks) for count in np.bincount(placement).tolist())
        return Rows(self.width, (used_by(1 / ranks),) * ranks, of_nodes, used_by(1.0))


SparseMessages = Callable[[np.ndarray, Rows], list[Stage]]  # (the node of each rank, the rows)


def rows_everywhere(placement: np.ndarray, rows: Rows) -> list[Stage]:
    """Send each rank's rows to their owners, which add them; then send the sums to all ranks."""
    return _everywhere(np.arange(len(placement)), np.array(rows.of_ranks), rows)


def node_rows_everywhere(placement: np.ndarray, rows: Rows) -> list[Stage]:
    """Send each node's sums to the rows' owners, which add them; then send the sums to all nodes."""
    return _everywhere(leaders_of(placement), np.array(rows.of_nodes), rows)


def node_rows_to_owners(placement: np.ndarray, rows: Rows) -> list[Stage]:
    """Send each node's sums to the nodes that own the rows. After the update each node asks the owners for the rows of
    its next step, assumed to be as many."""
    leaders = leaders_of(placement)
    counts = np.array(rows.of_nodes)
    owners, asking, ids = _each_to_all(leaders, ID_BYTES * counts)
    *_, sizes = _each_to_all(leaders, ELEMENT_BYTES * rows.width * counts)
    asked = stage(asking, owners, ids, steps=ASKING, all_together=True)
    given = stage(owners, asking, sizes, steps=len(leaders) - 1, all_together=True)
    return [_to_owners(leaders, counts, rows), asked, given]


def _everywhere(members: np.ndarray, counts: np.ndarray, rows: Rows) -> list[Stage]:
    destination, source, size = _each_to_all(members, np.full(len(members), rows.row_bytes * rows.any))
    sums = stage(source, destination, size, steps=ASKING + len(members) - 1, all_together=True)
    return [_to_owners(members, counts, rows), sums]


def _to_owners(members: np.ndarray, counts: np.ndarray, rows: Rows) -> Stage:
    """Send rows to their owners. counts: rows of each of the members, (len(members),)."""
    destination, source, size = _each_to_all(members, rows.row_bytes * counts)
    added = int(counts.mean() * rows.row_bytes)
    return stage(source, destination, size, steps=ASKING + len(members) - 1, added=added, all_together=True)


def _each_to_all(members: np.ndarray, held: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (one, another, bytes) for all pairs of members; bytes: an even share of another's `held`, (len(members),).
    Beyond MOST_MEMBERS one pair per member represents all its pairs, with the sum of their bytes."""
    count = len(members)
    if count > MOST_MEMBERS:
        return np.roll(members, count // 2), members, held * (count - 1) / count
    return np.tile(members, count), np.repeat(members, count), np.repeat(held, count) / count
