"""Vectors whose sum over the ranks is known exactly, even in bfloat16.

Each rank repeats a short table of random numbers. The table's length is a prime, so that a misplaced value is noticed.
Elements are whole numbers whose sum over all ranks is at most 256, so bfloat16 and float32 represent every partial sum
exactly, in any order of additions.
"""

import numpy as np

from dist.cost.memory import VECTOR_BYTES

PERIOD = 4099
SHARD_MULTIPLE = 16  # elements, as in training: a rank's shard begins on a cache line
LARGEST = 256  # bfloat16, with 8 bits of significand, represents every whole number up to this one exactly


def vector_size(size_bytes: int, ranks: int) -> int:
    """Return the length of a vector of at least `size_bytes` bytes that divides into equal shards."""
    multiple = SHARD_MULTIPLE * ranks
    return -(-size_bytes // (VECTOR_BYTES * multiple)) * multiple


def rank_values(rank: int, ranks: int) -> np.ndarray:
    """Return the table of one rank, (PERIOD,) float32; the same on every machine."""
    random = np.random.default_rng([rank, ranks])
    most = max(1, LARGEST // ranks)
    return random.binomial(most, min(0.5, LARGEST / 2 / ranks), PERIOD).astype(np.float32)


def summed_values(contributors: list[bool]) -> np.ndarray:
    """Return the sum of the tables of the ranks that contribute, (PERIOD,) float32."""
    ranks = len(contributors)
    tables = (rank_values(rank, ranks) for rank, contributes in enumerate(contributors) if contributes)
    return sum(tables, np.zeros(PERIOD, np.float32))


def fill(flat: np.ndarray, table: np.ndarray) -> None:
    """Repeat the table over the whole of `flat`."""
    rows, rest = _rows(flat)
    rows[:] = table
    rest[:] = table[: len(rest)]


def is_filled(flat: np.ndarray, table: np.ndarray, within: float = 0.0) -> bool:
    """Return whether `flat` is the repeated table, up to differences of at most `within`."""
    rows, rest = _rows(flat)
    return all((np.abs(row - table[: len(row)]) <= within).all() for row in (*rows, rest))


def rounding_of(wire: str, ranks: int) -> float:
    """Return by how much a sum may differ. In int8 that is a scale, 127th of the largest value of a block, for each
    rounding: half of one for itself, half for the error of the previous exchange. The largest values of all nodes add
    up to at most those of all ranks, and so does the largest sum. Errors and rounding raise scales by up to 2%."""
    return 1.02 * 2 * max(LARGEST, ranks) / 127 if wire == "int8" else 0.0


def _rows(flat):
    whole = len(flat) // PERIOD * PERIOD
    return flat[:whole].reshape(-1, PERIOD), flat[whole:]
