"""Loops over matrices (rows, columns) and products p q that are never stored: p (rows, R), q (R, columns), float32.

Each R has its own compiled loops, which compute an element of p q in registers. They use IEEE arithmetic in a fixed
order, so the element has the same bits on every CPU, whichever thread computes its row.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
from numba.extending import register_jitable

from gpt2.kernels.numpy.compiling import compiled, compiled_sums
from gpt2.kernels.numpy.loops import adamw_element

DEPENDENT = 1e-12  # of a column's sum of squares: what float32 leaves of a column that depends on others


@dataclass(frozen=True)
class FactoredGradients:
    """Gradients for AdamW in which some matrices are products p q. np.asarray computes these in `flat`, and returns it.

    flat: (size,); matrices: (start in flat, p, q) of each, in order.
    """

    flat: np.ndarray
    matrices: list[tuple[int, np.ndarray, np.ndarray]]

    def parts(self) -> Iterator[tuple[int, int, np.ndarray | tuple[np.ndarray, np.ndarray]]]:
        """Yield (start, stop, gradients) of ranges that cover flat. gradients: a flat array, or (p, q)."""
        stop = 0
        for start, p, q in self.matrices:
            yield stop, start, self.flat[stop:start]
            stop = start + len(p) * q.shape[1]
            yield start, stop, (p, q)
        yield stop, len(self.flat), self.flat[stop:]

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        for start, p, q in self.matrices:
            self.flat[start : start + len(p) * q.shape[1]] = (p @ q).reshape(-1)
        return self.flat


@compiled_sums
def _dot(a, b):
    total = 0.0
    for n in range(len(a)):
        total += a[n] * b[n]
    return total


@compiled_sums
def gram_schmidt(columns, first) -> int:
    """Make columns (R, rows) orthonormal from the column `first` on, and return R; each projection is made twice.

    Stop at a column that depends on those before it, or is 0, and return its index. columns: float64.
    """
    for index in range(first, len(columns)):
        column = columns[index]
        squares = _dot(column, column)
        for _ in range(2):
            for earlier in range(index):
                before = columns[earlier]
                product = _dot(before, column)
                for n in range(len(column)):
                    column[n] -= product * before[n]
        left = _dot(column, column)
        if left <= DEPENDENT * squares:
            return index
        scale = 1 / math.sqrt(left)
        for n in range(len(column)):
            column[n] *= scale
    return len(columns)


@cache
def loops_of(R: int) -> tuple[Callable, Callable]:
    """Return project and adamw for this R.

    project(matrix, p, q, added, new_q): matrix = (matrix - p q) + added; then p = matrix new_q^T.
    adamw(parameters, p, q, m, v, beta1, ...): loops.adamw for matrices, with p q as the gradients.
    """

    @register_jitable(error_model="numpy", fastmath=False)
    def product(row_p, q, c):
        total = np.float32(0)
        for r in range(R):
            total += row_p[r] * q[r, c]
        return total

    @register_jitable(error_model="numpy", fastmath=False)
    def changed(number, subtracted, added):
        return number - subtracted + added

    @compiled_sums
    def project(matrix, p, q, added, new_q):
        for n in range(len(matrix)):
            row = matrix[n]
            row_p = p[n]
            row_added = added[n]
            for c in range(len(row)):
                row[c] = changed(row[c], product(row_p, q, c), row_added[c])
            for r in range(R):
                total = np.float32(0)
                for c in range(len(row)):
                    total += row[c] * new_q[r, c]
                row_p[r] = total

    @compiled
    def adamw(parameters, p, q, m, v, beta1, beta2, step_size, eps, keep, gradient_scale):
        for n in range(len(parameters)):
            row = parameters[n]
            row_m = m[n]
            row_v = v[n]
            row_p = p[n]
            for c in range(len(row)):
                gradient = product(row_p, q, c) * gradient_scale
                numbers = beta1, beta2, step_size, eps, keep
                row[c], row_m[c], row_v[c] = adamw_element(row[c], row_m[c], row_v[c], gradient, *numbers)

    return project, adamw
