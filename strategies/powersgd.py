"""powersgd: gradient matrices travel as two thin factors, everything else exactly; every rank makes the same update.

    M = gradients + errors;  P = M Q                 each matrix; Q: from the previous step, made orthonormal
    all-reduce of P, of what is sent exactly;  P: made orthonormal
    Q = M^T P;  all-reduce of Q                      the sum of all M is about P Q^T
    errors = M - P Q^T / N;  AdamW on every rank     with P Q^T as the gradients

Vogels, Karimireddy, Jaggi 2019, PowerSGD: Practical Low-Rank Gradient Compression, with sums instead of means: losses
are scaled by the global batch. A matrix costs R (rows + columns) elements instead of rows * columns; it is sent exactly
if that is no less, and so are biases and LayerNorms. Factors travel around a ring of all ranks (dist/host/host_ring.py)
while those of other matrices are computed. Each rank holds all optimizer state (2 D) and its errors (D). All ranks get
the same sums, and make the same products of them: the same bits, if all nodes have CPUs of one kind.

Checkpoints hold each rank's errors, followed by Q. On other ranks both begin anew, at 0. With another R the errors go
on, and Q begins with numbers of the old Q in another order.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from dist.cost.memory import Memory
from dist.cost.messages import Messages, Setting, ring_of
from dist.cost.mpi_choices import UnknownChoice
from strategies.base import Strategy
from strategies.traits import Traits

BLOCK_ELEMENTS = 1 << 16  # rows are processed in blocks that stay in a core's cache
DEPENDENT = 1e-12  # of a column's sum of squares: what float32 leaves of a column that depends on others


def low_rank(matrices, rank: int) -> list[tuple[int, int, int]]:
    """Return the (start, rows, columns) whose two factors of this rank have fewer elements than the matrix."""
    return [one for one in matrices if rank * (one[1] + one[2]) < one[1] * one[2]]


def factors_sent(setting: Setting) -> Messages:
    """Sum what is sent exactly, all P and all Q around a ring. UnknownChoice: the matrices are unknown."""
    if setting.matrices is None:
        raise UnknownChoice("the shapes of the matrices, which travel as factors, are unknown: name a model")
    matrices = low_rank(setting.matrices, setting.low_rank)
    exact = setting.elements - sum(rows * columns for _, rows, columns in matrices)
    sizes = [exact, *(setting.low_rank * side for _, *sides in matrices for side in sides)]
    return ring_of(setting.ranks, sum(setting.blocks(len(setting.placement), elements) for elements in sizes))


class PowerSGD(Strategy):
    name = "powersgd"
    traits = Traits(
        line="two thin factors of each matrix",
        same_weights=False,
        flags=("low_rank",),
        shares_sums=True,
        memory=Memory(gradients="2"),
        messages=factors_sent,
    )

    def __init__(self, job):
        super().__init__(job)
        rank = job.low_rank
        shapes = low_rank(job.matrices, rank)
        q_start = len(self.parameters)
        self.memory = np.zeros(q_start + sum(rank * columns for *_, columns in shapes), np.float32)  # errors, each Q
        self.exchange = job.new_exchange(self.comm, [(0, len(self.memory))])
        self.matrices = []
        self.exact = []  # the gradients between the matrices
        end = 0
        for start, rows, columns in shapes:
            self.exact.append(self.gradients[end:start])
            end = start + rows * columns
            pair = (flat[start:end].reshape(rows, columns) for flat in (self.gradients, self.memory))
            q = self.memory[q_start : q_start + rank * columns].reshape(columns, rank)
            q_start += q.size
            self.matrices.append(Factored(*pair, np.empty((rows, rank), np.float32), q, self.exchange.engine.progress))
        self.exact.append(self.gradients[end:])
        self.sent = np.concatenate(self.exact)
        self.optimizer = job.new_optimizer(0, len(self.parameters))

    def errors(self):
        return self.memory

    def update(self, lr):
        with self.tracer.phase("compress"):
            exact = self._start(np.concatenate(self.exact, out=self.sent))
            projected = [self._start(matrix.project()) for matrix in self.matrices]
        factored = []
        for matrix, exchange in zip(self.matrices, projected, strict=True):
            self._finish(exchange, matrix.p)
            with self.tracer.phase("compress"):
                factored.append(self._start(matrix.factor()))
        self._finish(exact, self.sent)
        for matrix, exchange in zip(self.matrices, factored, strict=True):
            self._finish(exchange, matrix.q)
            with self.tracer.phase("compress"):
                matrix.restore(self.comm.size)
        with self.tracer.phase("update"):
            for part, sums in zip(self.exact, np.split(self.sent, np.cumsum([*map(len, self.exact)])), strict=False):
                part[:] = sums
            squares = self.sum_of_squares(self.sent) + self.sum_of_squares(self.memory[len(self.parameters) :])
            norm, scale = self.clip(squares)  # P is orthonormal: Q has the norm of P Q^T
            self.optimizer.update(self.parameters, self.gradients, lr, scale)
        return norm

    def _start(self, array):
        """Start the all-reduce of a contiguous array; return it for `_finish`."""
        return self.exchange.engine.start(self.exchange.allreduce(array.reshape(-1), 0, array.size))

    def _finish(self, exchange, array) -> None:
        with self.tracer.phase("allreduce", bytes=array.nbytes):
            self.exchange.engine.finish(exchange)


@dataclass(frozen=True)
class Factored:
    """A matrix: gradients, errors (rows, columns), p (rows, R), q (columns, R), float32.

    progress() advances the exchanges of other matrices; it is called between blocks.
    """

    gradients: np.ndarray
    errors: np.ndarray
    p: np.ndarray
    q: np.ndarray
    progress: Callable[[], object]

    def project(self) -> np.ndarray:
        """Add the gradients to the errors, which thus become M; set P = M Q and return it.

        Q is made orthonormal first: P then spans the same columns, but loses less of them to rounding.
        """
        q = orthonormal(self.q).astype(np.float32)
        for rows in self._blocks():
            block = self.errors[rows]
            np.add(block, self.gradients[rows], out=block)
            np.matmul(block, q, out=self.p[rows])
        return self.p

    def factor(self) -> np.ndarray:
        """Make the columns of the summed P orthonormal; set Q = M^T P and return it."""
        self.p[:] = orthonormal(self.p)
        q = np.zeros(self.q.shape[::-1], np.float32)
        for rows in self._blocks():
            q += self.p[rows].T @ self.errors[rows]
        self.q[:] = q.T
        return self.q

    def restore(self, ranks: int) -> None:
        """Set the gradients to P Q^T, the sum over the ranks, and the errors to what it lacks of this rank's M."""
        q = np.ascontiguousarray(self.q.T) / np.float32(ranks)
        for rows in self._blocks():
            block = self.errors[rows]
            share = np.matmul(self.p[rows], q)
            np.subtract(block, share, out=block)
            np.multiply(share, np.float32(ranks), out=self.gradients[rows])

    def _blocks(self) -> Iterator[slice]:
        step = max(1, BLOCK_ELEMENTS // self.errors.shape[1])
        for start in range(0, len(self.errors), step):
            yield slice(start, start + step)
            self.progress()


def orthonormal(p: np.ndarray) -> np.ndarray:
    """Return orthonormal columns that span those of p (rows, R): Gram-Schmidt in float64, each projection made twice.

    A column that depends on the columns before it, or is 0, is replaced by a drawn one, the same on all ranks: so the
    first Q is drawn, as is Q after zero gradients. NaN stays NaN.
    """
    columns = np.array(p.T, np.float64, order="C")
    for index, column in enumerate(columns):
        before = columns[:index]
        squares = column @ column
        _project_out(column, before)
        if column @ column <= DEPENDENT * squares:
            column[:] = np.random.default_rng(index).standard_normal(len(column))
            _project_out(column, before)
        column /= math.sqrt(column @ column)
    return columns.T


def _project_out(column, others) -> None:
    for _ in range(2):
        column -= (others @ column) @ others
