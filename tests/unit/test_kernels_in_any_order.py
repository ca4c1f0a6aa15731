"""Kernels whose parts may end in any order give the same bits; long vectors and losses far out keep their precision."""

from itertools import pairwise

import numpy as np
import pytest

from gpt2.kernels import load_kernels
from gpt2.kernels.numpy import (
    adamw,
    classifier_forward,
    layernorm_backward,
    linear_backward,
    sum_of_squares,
)
from gpt2.kernels.numpy.cores import Cores
from gpt2.kernels.numpy.factors import FactoredGradients
from gpt2.kernels.numpy.loops import SQUARES

RANDOM = np.random.default_rng(7)


class InOrder(Cores):
    """Parts one after another on the calling thread, first to last or the other way round."""

    def __init__(self, threads: int, backwards: bool):
        super().__init__(1)
        self.parts, self.backwards = threads, backwards

    def for_parts(self, count, work):
        cuts = [count * part // self.parts for part in range(self.parts + 1)]
        pairs = list(pairwise(cuts))
        for start, stop in reversed(pairs) if self.backwards else pairs:
            work(start, stop)


def float32(*shape):
    return RANDOM.standard_normal(shape).astype(np.float32)


def both_orders(run):
    return [run(InOrder(5, backwards)) for backwards in (False, True)]


def test_layernorms_gradients_do_not_depend_on_who_is_first():
    N, C = 50, 7
    x, dy, weight = float32(N, C), float32(N, C), float32(C)
    mean, rstd = x.mean(1), 1 / x.std(1)

    def run(cores):
        dx, *sums = np.zeros((N, C), np.float32), *np.empty((3, C), np.float32)
        layernorm_backward(cores, dx, *sums, dy, x, mean, rstd, weight, False)
        return np.concatenate([dx.ravel(), *sums])

    np.testing.assert_array_equal(*both_orders(run))


def test_losses_do_not_depend_on_which_columns_are_first():
    x, wte, targets = float32(30, 4), float32(100, 4), RANDOM.integers(100, size=30)

    def run(cores):
        losses = np.empty(30, np.float32)
        classifier_forward(cores, losses, None, None, x, wte, targets, 100, 0.0)
        return losses

    np.testing.assert_array_equal(*both_orders(run))


@pytest.mark.parametrize(("outputs", "inputs"), [(3, 40), (40, 3)])
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_linear_layers_gradients_do_not_depend_on_how_they_are_cut(outputs, inputs, accumulate):
    """Four parts of each product, by columns or by rows: whole numbers, so that sums are exact."""
    x, w, dy = (
        RANDOM.integers(-3, 4, size).astype(np.float32) for size in ((9, inputs), (outputs, inputs), (9, outputs))
    )
    for cores in (Cores(1), Cores(8), InOrder(5, True)):
        dx, dw, db = np.empty_like(x), np.full_like(w, 2.0), np.full(outputs, 5, np.float32)
        linear_backward(cores, dx, dw, db, dy, x, w, accumulate)
        np.testing.assert_array_equal(dx, dy @ w)
        np.testing.assert_array_equal(dw, dy.T @ x + 2 * accumulate)
        np.testing.assert_array_equal(db, dy.sum(0) + 5 * accumulate)


def test_adamw_does_not_depend_on_how_it_is_cut():
    p, g = float32(1000), float32(1000)

    def run(cores):
        parameters, m, v = p.copy(), np.zeros(1000, np.float32), np.zeros(1000, np.float32)
        for step in (1, 2):
            adamw(cores, parameters, g, m, v, [(100, 450)], step, 0.1, 0.9, 0.95, 1e-8, 0.1, 0.5)
        return parameters

    expected = run(Cores(1))
    for found in both_orders(run):
        np.testing.assert_array_equal(found, expected)


def test_adamw_of_factors_does_not_depend_on_how_it_is_cut():
    """The gradients of two matrices are products of factors, and the cuts between threads lie within rows."""
    p, g = float32(1000), float32(1000)
    matrices = [(103, float32(7, 3), float32(3, 20)), (243, float32(42, 6), float32(6, 5))]

    def run(cores, gradients=None):
        gradients = FactoredGradients(g, matrices) if gradients is None else gradients
        parameters, m, v = p.copy(), np.zeros(1000, np.float32), np.zeros(1000, np.float32)
        for step in (1, 2):
            adamw(cores, parameters, gradients, m, v, [(103, 453)], step, 0.1, 0.9, 0.95, 1e-8, 0.1, 0.5)
        return np.stack([parameters, m, v])

    expected = run(Cores(1))
    for found in both_orders(run):
        np.testing.assert_array_equal(found, expected)
    flat = np.asarray(FactoredGradients(g.copy(), matrices))
    np.testing.assert_allclose(run(Cores(1), flat), expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(flat[243:453], (matrices[1][1] @ matrices[1][2]).ravel(), rtol=1e-5)
    np.testing.assert_array_equal(flat[453:], g[453:])


@pytest.mark.parametrize("size", [SQUARES - 1, SQUARES, SQUARES + 1, 2 * SQUARES + 3])
def test_a_sum_of_squares_takes_every_element_of_every_block(size):
    """Whole numbers, so that float32 is exact: each place counts once."""
    cores, flat = Cores(1), np.zeros(size, np.float32)
    for place in {0, size // 2, SQUARES - 1, SQUARES, size - 1, 2 * SQUARES - 1, 2 * SQUARES} & set(range(size)):
        flat[place] = 3
        assert sum_of_squares(cores, flat) == 9, place
        flat[place] = 0
    flat[:] = np.arange(size) % 5
    assert sum_of_squares(cores, flat) == sum((np.arange(size) % 5).astype(int) ** 2)


@pytest.mark.parametrize("threads", [1, 2])
def test_gradients_of_losses_far_out_are_as_precise(threads):
    """Losses from 40 to 110, scaled as in a batch of half a million tokens: float32 against float64."""
    N, V, scale = 71, 6, 2e-6
    x = np.zeros((N, 2))
    x[:, 0], x[:, 1] = np.arange(40, 40 + N), 1
    wte, targets = np.zeros((V, 2)), np.zeros(N, int)
    wte[1:, 0], wte[1:, 1] = 1, np.log([1, 0.9, 0.8, 0.5, 0.1])
    kernels, found = load_kernels("numpy", threads), []
    for dtype in (np.float32, np.float64):
        for rows in range(N):  # each row alone: what one needs must not help the others
            losses, exponentials, row_scale = np.empty(1, dtype), np.empty((1, V), dtype), np.empty(1, dtype)
            one, table = x[rows : rows + 1].astype(dtype), wte.astype(dtype)
            kernels.classifier_forward(losses, exponentials, row_scale, one, table, targets[:1], V, dtype(scale))
            dx, dwte = np.empty((1, 2), dtype), np.empty((V, 2), dtype)
            kernels.classifier_backward(dx, dwte, exponentials, row_scale, one, table, False)
            found.append((losses[0], *dx.ravel(), *dwte.ravel()))
    single, double = np.array(found[:N]), np.array(found[N:])
    assert double[0, 0] > 40
    np.testing.assert_allclose(single, double, rtol=2e-5)
