"""powersgd: gradient matrices travel as two thin factors, everything else exactly; every rank makes the same update.

    M = gradients + errors;  P = M Q                 each matrix; Q: from the previous step, made orthonormal
    all-reduce of all P with what is sent exactly;  P: made orthonormal
    Q = M^T P;  all-reduce of all Q                  the sum of all M is about P Q^T
    AdamW on every rank                              with P Q^T as the gradients
    errors = M - P Q^T / N                           in the next step, or for a checkpoint

Vogels, Karimireddy, Jaggi 2019, PowerSGD: Practical Low-Rank Gradient Compression, with sums instead of means: losses
are scaled by the global batch. A matrix costs R (rows + columns) elements instead of rows * columns; it is sent exactly
if that is no less, and so are biases and LayerNorms. The all-reduces go around a ring of all ranks
(dist/host/host_ring.py), each in two parts: one travels while the other is computed. Each rank holds all optimizer
state (2 D) and its errors (D). All ranks get the same sums, and make the same products of them: the same bits, if all
nodes have CPUs of one kind.

Memory bandwidth limits every pass over the matrices, so there are few: one pass computes the errors, M and P, and AdamW
computes P Q^T itself instead of reading it (gpt2/kernels/numpy/factors.py).

A checkpoint holds each rank's errors, followed by every Q^T. If the number of ranks changes, both start from 0. If R
changes, the errors carry over, and Q starts from the old numbers in a different order.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from dist.cost.memory import Memory
from dist.cost.messages import Messages, Setting, in_turn, ring_of
from dist.cost.mpi_choices import UnknownChoice
from dist.ranges import side_by_side
from strategies.base import Strategy
from strategies.traits import Traits

BLOCK_ELEMENTS = 1 << 16  # of rows that stay in a core's cache


def low_rank(matrices, rank: int) -> list[tuple[int, int, int]]:
    """Return the (start, rows, columns) whose two factors of this rank have fewer elements than the matrix."""
    return [one for one in matrices if rank * (one[1] + one[2]) < one[1] * one[2]]


def two_parts(matrices, size: int) -> tuple[list, list]:
    """Cut a list of matrices in two by where they start in the flat buffer of `size`: each part has its all-reduces."""
    first = [one for one in matrices if one[0] < size / 2]
    return first, matrices[len(first) :]


def factors_sent(setting: Setting) -> Messages:
    """Return the messages of four rings: two of what is sent exactly and all P, then two of all Q.

    Raise UnknownChoice if the shapes of the matrices are unknown.
    """
    if setting.matrices is None:
        raise UnknownChoice("the shapes of the matrices, which travel as factors, are unknown: name a model")
    matrices = low_rank(setting.matrices, setting.low_rank)
    parts = two_parts(matrices, setting.elements)
    sizes = [setting.low_rank * sum(one[side] for one in part) for side in (1, 2) for part in parts]
    sizes[0] += setting.elements - sum(rows * columns for _, rows, columns in matrices)
    blocks = [setting.blocks(len(setting.placement), elements) for elements in sizes]
    return in_turn(*(ring_of(setting.ranks, of_ranks) for of_ranks in blocks))


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
        from gpt2.kernels.numpy.factors import FactoredGradients, loops_of  # slow to import: numba

        super().__init__(job)
        size = len(self.parameters)
        rank = job.low_rank
        shapes = low_rank(job.matrices, rank)
        starts = [start for start, *_ in shapes]
        stops = [start + rows * columns for start, rows, columns in shapes]
        gaps = list(zip([0, *stops], [*starts, size], strict=True))  # what no matrix covers
        sent_sizes = [stop - start for start, stop in gaps] + [rank * rows for _, rows, _ in shapes]
        q_sizes = [rank * columns for *_, columns in shapes]
        self.sent = np.zeros(sum(sent_sizes), np.float32)  # gradients that are sent exactly, then each P
        self.memory = np.zeros(size + sum(q_sizes), np.float32)  # errors, or M; then each Q^T
        self.q = self.memory[size:]
        self.mean_q = np.zeros_like(self.q)
        sent = [self.sent[slice(*place)] for place in side_by_side(sent_sizes)]
        self.exact = [(self.gradients[slice(*gap)], part) for gap, part in zip(gaps, sent[: len(gaps)], strict=True)]
        project, _ = loops_of(rank)
        self.matrices = []
        for (start, rows, columns), p, q in zip(shapes, sent[len(gaps) :], side_by_side(q_sizes), strict=True):
            part = slice(start, start + rows * columns)
            pair = (flat[part].reshape(rows, columns) for flat in (self.gradients, self.memory))
            qs = (flat[slice(*q)].reshape(rank, columns) for flat in (self.q, self.mean_q))
            self.matrices.append(Factored(*pair, p.reshape(rows, rank), *qs, project))
        products = [(start, one.p, one.q) for start, one in zip(starts, self.matrices, strict=True)]
        self.sums = FactoredGradients(self.gradients, products)
        half = len(two_parts(shapes, size)[0])
        sent_stop = sum(sent_sizes[: len(gaps) + half])
        q_stop = sum(q_sizes[:half])
        self.parts = [
            (self.matrices[:half], self.sent[:sent_stop], self.q[:q_stop]),
            (self.matrices[half:], self.sent[sent_stop:], self.q[q_stop:]),
        ]
        self.exchange = job.new_exchange(self.comm, [(0, max(len(self.sent), len(self.q)))])
        self.optimizer = job.new_optimizer(0, size)

    def errors(self):
        for matrix in self.matrices:
            matrix.update_errors()
        return self.memory

    @np.errstate(invalid="ignore")  # numbers that are not finite reach the norm, which ends the run
    def update(self, lr):
        with self.tracer.phase("compress"):
            for gradients, sent in self.exact:
                sent[:] = gradients
        sums_of_p = [self._compress(matrices, Factored.compute_p, p) for matrices, p, _ in self.parts]
        for (matrices, _, q), sum_of_p in zip(self.parts, sums_of_p, strict=True):
            self._finish(sum_of_p)
            self._compress(matrices, Factored.compute_q, q)
        self._finish()
        with self.tracer.phase("update"):
            np.divide(self.q, np.float32(self.comm.size), out=self.mean_q)
            for gradients, sent in self.exact:
                gradients[:] = sent
            parts = self.q, *(gradients for gradients, _ in self.exact)  # P is orthonormal: Q has the norm of P Q^T
            norm, scale = self.clip(sum(map(self.sum_of_squares, parts)))
            self.optimizer.update(self.parameters, self.sums, lr, scale)
        return norm

    def _compress(self, matrices, compute, factors):
        """Compute one factor of each matrix, and start the all-reduce of the flat `factors`. Return it."""
        with self.tracer.phase("compress"):
            for matrix in matrices:
                compute(matrix, self.exchange.engine.progress)
        with self.tracer.phase("allreduce", bytes=factors.nbytes):
            return self.exchange.engine.start(self.exchange.allreduce(factors, 0, len(factors)))

    def _finish(self, allreduce=None) -> None:
        """Wait for this all-reduce, or for all."""
        with self.tracer.phase("allreduce"):
            self.exchange.engine.finish(allreduce)


@dataclass(frozen=True)
class Factored:
    """A matrix: gradients, errors (rows, columns), p (rows, R), q, mean_q = q / N (R, columns), float32.

    `compute_p` leaves M in `errors`. The next `compute_p`, or `update_errors` before it, subtracts P Q^T / N.
    project: see gpt2.kernels.numpy.factors.loops_of. progress() is called every few milliseconds, to advance
    all-reduces that are under way.
    """

    gradients: np.ndarray
    errors: np.ndarray
    p: np.ndarray
    q: np.ndarray
    mean_q: np.ndarray
    project: Callable

    def compute_p(self, progress) -> None:
        """Compute the errors of the last step, add the gradients to get M, and set P = M Q.

        Q is made orthonormal first: P then spans the same columns, but loses less of them to rounding.
        """
        q = np.ascontiguousarray(orthonormal(self.q.T).T, np.float32)
        for rows in self._blocks(16 * BLOCK_ELEMENTS):
            self.project(self.errors[rows], self.p[rows], self.mean_q, self.gradients[rows], q)
            progress()

    def compute_q(self, progress) -> None:
        """Make the columns of the summed P orthonormal, and set Q = M^T P."""
        self.p[:] = orthonormal(self.p)
        self.q.fill(0)
        for index, rows in enumerate(self._blocks(BLOCK_ELEMENTS)):
            np.add(self.q, self.p[rows].T @ self.errors[rows], out=self.q)
            if index % 8 == 0:
                progress()

    def update_errors(self) -> None:
        """Subtract P Q^T / N from M now, with the same bits as `compute_p`, which then subtracts 0."""
        if not self.mean_q.any():
            return  # done before
        for rows in self._blocks(BLOCK_ELEMENTS):
            nothing = np.zeros_like(self.errors[rows])
            self.project(self.errors[rows], self.p[rows], self.mean_q, nothing, self.q)
        self.p.fill(0)
        self.mean_q.fill(0)

    def _blocks(self, elements: int) -> Iterator[slice]:
        """Yield slices of rows that cover the matrix, of at most so many elements each."""
        step = max(1, elements // self.errors.shape[1])
        for start in range(0, len(self.errors), step):
            yield slice(start, start + step)


def orthonormal(p: np.ndarray) -> np.ndarray:
    """Return orthonormal columns that span those of p (rows, R): Gram-Schmidt in float64, each projection made twice.

    A column that depends on the columns before it, or is 0, is replaced by a drawn one, the same on all ranks: so the
    first Q is drawn, as is Q after zero gradients. NaN stays NaN.
    """
    from gpt2.kernels.numpy.factors import gram_schmidt  # slow to import: numba

    columns = np.array(p.T, np.float64, order="C")
    first = 0
    seed = 0
    while (first := gram_schmidt(columns, first)) < len(columns):
        columns[first] = np.random.default_rng(seed).standard_normal(len(p))
        seed += 1
    return columns.T
