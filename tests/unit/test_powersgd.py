"""PowerSGD's factors against PyTorch, on ranks that are threads; where the method is exact; and what may go wrong."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dist.buffers import OwnBuffers
from gpt2.kernels import load_kernels
from gpt2.optimizer import Clipping
from strategies import Job
from strategies.powersgd import PowerSGD, orthonormal
from tests.fixtures.make_powersgd import MATRICES, RANK, SIZE, first_q, gradients
from tests.support.thread_ranks import run_ranks
from traces import Tracer

FIXTURE = np.load(Path(__file__).parents[1] / "fixtures" / "powersgd.npz")
KERNELS = load_kernels("numpy", 1)
PLACES = [1], [1, 1], [1, 2], [2, 2], [1, 1, 1, 1]


class Reads:
    """As an optimizer that changes nothing."""

    def update(self, parameters, gradients, lr, scale):
        self.read = np.asarray(gradients).copy()


def new_strategy(world, **changes):
    buffers = OwnBuffers(world, SIZE, [(0, SIZE)])
    job = Job(world, buffers, lambda start, stop: Reads(), KERNELS.sum_of_squares, Clipping(0.0), Tracer())
    return PowerSGD(replace(job, **{"matrices": MATRICES, "low_rank": RANK, **changes}))


def steps(nodes, given, **changes):
    """The sums (steps, size) of each rank, its norms and its strategy. given: (steps, ranks, size)."""

    def program(world):
        strategy = new_strategy(world, **changes)
        if not changes:
            for matrix, q in zip(strategy.matrices, first_q(), strict=True):
                matrix.q[:] = q.T
        sums, norms = [], []
        for step in given:
            strategy.gradients[:] = step[world.rank]
            norms.append(strategy.update(0.0))
            sums.append(strategy.optimizer.read)
        return SimpleNamespace(sums=np.stack(sums), norms=norms, strategy=strategy)

    ranks = run_ranks(nodes, program)
    assert len({rank.sums.tobytes() + rank.strategy.errors()[SIZE:].tobytes() for rank in ranks}) == 1, (
        "the ranks' bits differ"
    )
    return ranks


def assert_close(found, expected, tolerance):
    """Of the largest number."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize("nodes", [[2, 2], [1, 1, 1, 1]], ids=str)
def test_twenty_steps_of_pytorch(nodes):
    ranks = steps(nodes, gradients())
    for found, expected in zip(ranks[0].sums, FIXTURE["sums"], strict=True):
        assert_close(found, expected, 1e-5)
    for rank, expected in zip(ranks, FIXTURE["errors"], strict=True):
        assert_close(rank.strategy.errors()[:SIZE], expected, 1e-5)
    norms = np.linalg.norm(FIXTURE["sums"].astype(float), axis=1)
    np.testing.assert_allclose(ranks[0].norms, norms, rtol=1e-5)


@pytest.mark.parametrize("nodes", PLACES, ids=str)
def test_matrices_of_full_rank_in_factors_are_exact(nodes):
    """Each sum has the factors' rank, though the ranks' matrices have more. The first Q is drawn, and may fit badly."""
    random = np.random.default_rng(3)
    given = random.standard_normal((3, sum(nodes), SIZE)).astype(np.float32)
    for start, rows, columns in MATRICES[:2]:
        part = slice(start, start + rows * columns)
        given[:, 0, part] = -given[:, 1:, part].sum(axis=1)
        left, right = random.standard_normal((3, rows, RANK)), random.standard_normal((RANK, columns))
        given[:, 0, part] += (left @ right).reshape(3, -1).astype(np.float32)
    ranks = steps(nodes, given)
    for found, expected, close in zip(ranks[0].sums, given.astype(float).sum(axis=1), (1e-5, 1e-5, 1e-6), strict=True):
        assert_close(found, expected, close)


@pytest.mark.parametrize("nodes", PLACES, ids=str)
def test_nothing_is_lost_but_put_off(nodes):
    """All that was sent, and the errors that remain, are all gradients that were given."""
    given = np.random.default_rng(4).standard_normal((9, sum(nodes), SIZE)).astype(np.float32)
    ranks = steps(nodes, given, low_rank=1)
    left = sum(rank.strategy.errors()[:SIZE].astype(float) for rank in ranks)
    assert_close(ranks[0].sums.astype(float).sum(axis=0) + left, given.astype(float).sum(axis=(0, 1)), 1e-5)
    assert left[:161].any()
    assert not left[161:166].any()
    assert not left[538:].any()


def test_a_checkpoint_changes_no_bit():
    """Whether errors() or the next step subtracts P Q^T / N, all results have the same bits."""
    strategies = run_ranks([1], lambda world: [new_strategy(world, low_rank=3) for _ in range(2)])[0]
    for given in gradients()[:4, 0]:
        for strategy in strategies:
            strategy.gradients[:] = given
            strategy.update(0.0)
        before = strategies[0].errors().copy()
        assert strategies[0].errors().tobytes() == before.tobytes()
        assert before[:SIZE].any()
        assert strategies[0].optimizer.read.tobytes() == strategies[1].optimizer.read.tobytes()
    assert strategies[1].errors().tobytes() == before.tobytes()


def test_zero_gradients_and_dependent_columns():
    given = np.zeros((4, 2, SIZE), np.float32)
    given[1, :, :7] = 1.0  # one row of a matrix, from the second step
    found = steps([1, 1], given)[0]
    assert not found.sums[0].any()
    assert_close(found.sums.sum(axis=0), given.sum(axis=(0, 1)), 1e-6)


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_orthonormal_columns_span_those_given(rank):
    random = np.random.default_rng(rank)
    p = (random.standard_normal((50, rank)) @ random.standard_normal((rank, 3))).astype(np.float32)
    found = orthonormal(p)
    np.testing.assert_allclose(found.T @ found, np.eye(3), atol=1e-12)
    np.testing.assert_allclose(found @ (found.T @ p), p, atol=1e-5)


def test_columns_that_are_nearly_parallel_become_orthogonal():
    p = 1 + 3e-6 * np.random.default_rng(0).standard_normal((50, 3))
    found = orthonormal(p)
    np.testing.assert_allclose(found.T @ found, np.eye(3), atol=1e-13)
    np.testing.assert_allclose(found @ (found.T @ p), p, atol=1e-13)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("place", [100, 165], ids=["in a matrix", "in a vector"])
def test_what_is_not_finite_is_told_and_forgotten(bad, place):
    given = gradients()[:3].copy()
    given[1, 3, place] = bad
    ranks = steps([2, 2], given)
    assert [np.isfinite(norm) for norm in ranks[0].norms] == [True, False, True]
    for rank in ranks:
        assert np.isfinite(rank.strategy.errors()).all()
        assert np.isfinite(rank.sums[2]).all()
