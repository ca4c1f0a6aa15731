"""powersgd: gradient matrices travel as two thin factors, everything else exactly; every rank makes the same update.

    M = gradients + errors;  P = M Q                 each matrix; Q: from the previous step, made orthonormal
    all-reduce of all P with what is sent exactly;  P: made orthonormal
    Q = M^T P;  all-reduce of all Q                  the sum of all M is about P Q^T
    errors = M - P Q^T / N;  AdamW on every rank     with P Q^T as the gradients

Vogels, Karimireddy, Jaggi 2019, PowerSGD: Practical Low-Rank Gradient Compression, with sums instead of means: losses
are scaled by the global batch. A matrix costs R (rows + columns) elements instead of rows * columns; it is sent exactly
if that is no less, and so are biases and LayerNorms. Both all-reduces go around a ring of all ranks
(dist/host/host_ring.py). Each rank holds all optimizer state (2 D) and its errors (D). All ranks get the same sums, and
make the same products of them: the same bits, if all nodes have CPUs of one kind.

Checkpoints hold each rank's errors, followed by Q. On other ranks both begin anew, at 0. With another R the errors go
on, and Q begins with numbers of the old Q in another order.
"""

import math
from collections.abc import Iterator
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
    """Return the messages of two rings: of all P with what is sent exactly, then of all Q.

    Raise UnknownChoice if the shapes of the matrices are unknown.
    """
    if setting.matrices is None:
        raise UnknownChoice("the shapes of the matrices, which travel as factors, are unknown: name a model")
    matrices = low_rank(setting.matrices, setting.low_rank)
    first = setting.elements + sum((setting.low_rank - columns) * rows for _, rows, columns in matrices)
    sizes = [first, sum(setting.low_rank * columns for *_, columns in matrices)]
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
        size = len(self.parameters)
        rank = job.low_rank
        shapes = low_rank(job.matrices, rank)
        q_ends = size + np.cumsum([0, *(rank * columns for *_, columns in shapes)])
        self.memory = np.zeros(q_ends[-1], np.float32)  # errors, then each Q
        self.q = self.memory[size:]
        self.matrices = []
        for (start, rows, columns), q_start in zip(shapes, q_ends[:-1], strict=True):
            stop = start + rows * columns
            pair = (flat[start:stop].reshape(rows, columns) for flat in (self.gradients, self.memory))
            q = self.memory[q_start : q_start + rank * columns].reshape(columns, rank)
            self.matrices.append(Factored(*pair, np.empty((rows, rank), np.float32), q))
        edges = [0, *(edge for start, rows, columns in shapes for edge in (start, start + rows * columns)), size]
        self.exact = [self.gradients[start:stop] for start, stop in zip(edges[::2], edges[1::2], strict=True)]
        self.sent = np.concatenate([part.reshape(-1) for part in self._parts_sent()])
        self.exchange = job.new_exchange(self.comm, [(0, max(len(self.sent), len(self.q)))])
        self.optimizer = job.new_optimizer(0, size)

    def errors(self):
        return self.memory

    @np.errstate(invalid="ignore")  # numbers that are not finite reach the norm, which ends the run
    def update(self, lr):
        with self.tracer.phase("compress"):
            for matrix in self.matrices:
                matrix.project()
            np.concatenate([part.reshape(-1) for part in self._parts_sent()], out=self.sent)
        self._sum(self.sent)
        with self.tracer.phase("compress"):
            self._take_sums()
            for matrix in self.matrices:
                matrix.factor()
        self._sum(self.q)
        with self.tracer.phase("compress"):
            for matrix in self.matrices:
                matrix.restore(self.comm.size)
        with self.tracer.phase("update"):
            squares = sum(map(self.sum_of_squares, (self.q, *self.exact)))  # P is orthonormal: Q has the norm of P Q^T
            norm, scale = self.clip(squares)
            self.optimizer.update(self.parameters, self.gradients, lr, scale)
        return norm

    def _sum(self, flat) -> None:
        with self.tracer.phase("allreduce", bytes=flat.nbytes):
            self.exchange.start_allreduce(flat, 0, len(flat))
            self.exchange.engine.finish()

    def _parts_sent(self) -> list:
        """Return the arrays of the first all-reduce, in order."""
        return [*self.exact, *(matrix.p for matrix in self.matrices)]

    def _take_sums(self) -> None:
        used = 0
        for part in self._parts_sent():
            part[...] = self.sent[used : used + part.size].reshape(part.shape)
            used += part.size


@dataclass(frozen=True)
class Factored:
    """A matrix: gradients, errors (rows, columns), p (rows, R), q (columns, R), float32."""

    gradients: np.ndarray
    errors: np.ndarray
    p: np.ndarray
    q: np.ndarray

    def project(self) -> None:
        """Add the gradients to the errors, which thus become M, and set P = M Q.

        Q is made orthonormal first: P then spans the same columns, but loses less of them to rounding.
        """
        q = orthonormal(self.q).astype(np.float32)
        for rows in self._blocks():
            block = self.errors[rows]
            np.add(block, self.gradients[rows], out=block)
            np.matmul(block, q, out=self.p[rows])

    def factor(self) -> None:
        """Make the columns of the summed P orthonormal, and set Q = M^T P."""
        self.p[:] = orthonormal(self.p)
        q = np.zeros(self.q.shape[::-1], np.float32)
        for rows in self._blocks():
            q += self.p[rows].T @ self.errors[rows]
        self.q[:] = q.T

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
