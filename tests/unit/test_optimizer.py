"""Clipping, the rule for outliers, learning-rate schedules and AdamW of a range, each against its definition."""

import math
from itertools import pairwise

import numpy as np
import pytest

from gpt2.config import GPT2Config
from gpt2.kernels import load_kernels
from gpt2.optimizer import AdamW, AdamWSettings, Clipping, LearningRateSchedule, clip_scale
from gpt2.parameters import Layout

SETTINGS = AdamWSettings(beta1=0.5, beta2=0.8, eps=1e-3, weight_decay=0.25)
GRADIENT_SCALE = 0.25
KERNELS = load_kernels("numpy", 1)


@pytest.mark.parametrize(
    ("squares", "max_norm", "expected"),
    [
        (25.0, 2.0, (5.0, 0.4)),
        (25.0, 5.0, (5.0, 1.0)),
        (25.0, 8.0, (5.0, 1.0)),
        (25.0, 0.0, (5.0, 1.0)),
        (0, 1, (0, 1)),
    ],
)
def test_only_norms_above_the_largest_are_brought_down(squares, max_norm, expected):
    assert clip_scale(squares, max_norm) == expected


def skipped(norms, z, window):
    """Which steps are skipped by the rule, from its definition: the window holds what came before."""
    result = []
    for step, norm in enumerate(norms):
        past = np.array(norms[max(0, step - window) : step])
        result.append(bool(len(past) == window and norm - past.mean() > z * past.std()))
    return result


def test_outliers_are_far_above_the_last_128_norms():
    """Low norms are no outliers; nothing is skipped before there are 128; outliers stay in the window."""
    norms = np.random.default_rng(4).normal(10, 1, 200)
    norms[[5, 100, 127]], norms[[140, 150, 190]], norms[[145, 160]] = 50.0, [40.0, 22.0, 30.0], 0.01
    clipping = Clipping(1.0, outlier_z=1.2)
    factors = [clipping.scale(norm * norm)[1] for norm in norms]
    assert [factor is None for factor in factors] == skipped(norms, 1.2, 128)
    assert sum(factor is None for factor in factors) >= 2
    assert not any(factor is None for factor in factors[:128])


def test_the_spread_is_that_of_the_window_itself():
    """Of 0 and 2 the standard deviation is 1 around 1, without the correction for a sample."""
    for norm, skips in ((1.99, False), (2.01, True)):
        clipping = Clipping(0.0, outlier_z=1.0, window=2)
        assert clipping.scale(0.0) == (0.0, 1.0)
        assert clipping.scale(4.0) == (2.0, 1.0)
        assert (clipping.scale(norm * norm)[1] is None) == skips


def rate(name, step):
    """By the definitions: warm-up of 4 of 24 steps, from 2 down to 0.5; wsd decays over the last fifth."""
    if step <= 4:
        return 2.0 * step / 4
    share = (step - 4) / 20
    left = {
        "cosine": (1 + math.cos(math.pi * share)) / 2, "linear": 1 - share, "constant": 1.0,
        "wsd": 1.0 if step <= 19 else 1 - math.sqrt((step - 19) / 5),
    }  # fmt: skip
    return 0.5 + 1.5 * left[name]


@pytest.mark.parametrize("name", ["cosine", "linear", "constant", "wsd"])
def test_learning_rates_step_by_step(name):
    schedule = LearningRateSchedule(name, lr=2.0, min_lr=0.5, warmup=4, steps=24)
    found = [schedule.at(step) for step in range(1, 25)]
    np.testing.assert_allclose(found, [rate(name, step) for step in range(1, 25)], rtol=1e-12)


@pytest.mark.parametrize(("name", "floor"), [("cosine", 0.5), ("linear", 0.5), ("constant", 2.0), ("wsd", 0.5)])
def test_a_run_that_is_longer_than_its_schedule_stays_at_the_floor(name, floor):
    schedule = LearningRateSchedule(name, lr=2.0, min_lr=0.5, warmup=4, steps=24)
    assert [schedule.at(step) for step in (24, 25, 30, 44, 10**6)] == [floor] * 5
    within = LearningRateSchedule(name, lr=2.0, min_lr=0.5, warmup=4, steps=3)  # it ends in its warm-up
    assert [within.at(step) for step in (3, 4, 5, 100)] == [1.5, 2.0, floor, floor]


def textbook(parameters, gradients, decays, rates):
    """AdamW in float64, in its authors' form. gradients: of each step, None for one that is skipped."""
    p, m, v, t = parameters.astype(float), 0.0, 0.0, 0
    s = SETTINGS
    for g, lr in zip(gradients, rates, strict=True):
        if g is None:
            continue
        t, g = t + 1, GRADIENT_SCALE * g.astype(float)
        m, v = s.beta1 * m + (1 - s.beta1) * g, s.beta2 * v + (1 - s.beta2) * g * g
        step = m / (1 - s.beta1**t) / (np.sqrt(v / (1 - s.beta2**t)) + s.eps)
        p = p - lr * (step + s.weight_decay * decays * p)
    return p


@pytest.mark.parametrize("cuts", [(0, 1), (0, 0.3, 0.62, 1)], ids=["one", "three"])
def test_matrices_decay_and_biases_do_not_however_they_are_cut(cuts):
    """Each range by an AdamW of its own; one step of four is skipped, and does not count."""
    layout = Layout(GPT2Config(n_layer=2, n_head=1, n_embd=4, context=4, vocab_size=6))
    random = np.random.default_rng(1)
    parameters = random.standard_normal(layout.size).astype(np.float32)
    decays = np.zeros(layout.size)
    for tensor in layout.tensors:
        decays[tensor.start : tensor.stop] = tensor.name.startswith(("wte", "wpe")) or (
            tensor.name.endswith("_weight") and "ln" not in tensor.name
        )
    gradients = [random.standard_normal(layout.size).astype(np.float32) for _ in range(4)]
    gradients[1] = None
    rates = [0.1, 0.2, 0.05, 0.1]
    expected = textbook(parameters, gradients, decays, rates)
    points = [int(cut * layout.size) for cut in cuts]
    for start, stop in pairwise(points):
        optimizer = AdamW(KERNELS, layout, start, stop, SETTINGS)
        for g, lr in zip(gradients, rates, strict=True):
            part = parameters[start:stop]
            optimizer.update(
                part, parameters[start:stop] if g is None else g[start:stop], lr, None if g is None else GRADIENT_SCALE
            )
        assert optimizer.step == 3
    np.testing.assert_allclose(parameters, expected, rtol=1e-5, atol=1e-6)
