"""What becomes of a step's gradients before AdamW sees them, the learning rate, and AdamW on a part of the whole."""

import numpy as np
import pytest

from gpt2.config import GPT2Config
from gpt2.kernels import load_kernels
from gpt2.optimizer import AdamW, AdamWSettings, Clipping, LearningRateSchedule, clip_scale
from gpt2.parameters import Layout

LAYOUT = Layout(GPT2Config(n_layer=1, n_head=1, n_embd=4, context=3, vocab_size=5))


@pytest.mark.parametrize(("most", "factor"), [(0.0, 1.0), (5.0, 1.0), (8.0, 1.0), (2.0, 0.4)])
def test_a_norm_is_brought_down_and_never_up(most, factor):
    """The norm is 5; a limit of 0 is none."""
    assert clip_scale(25.0, most) == (5.0, pytest.approx(factor))


def after(norms, norm, window=8):
    """Whether a norm is skipped after these."""
    clipping = Clipping(0.0, 3.0, window)
    for one in norms:
        assert clipping.scale(one**2)[1] == 1.0
    return clipping.scale(norm**2)[1] is None


def test_only_norms_above_the_others_stand_out():
    norms = [0.9, 1.1] * 4  # a deviation of 0.1
    assert after(norms, 1.31)
    assert not after(norms, 1.29)
    assert not after(norms, 0.01)
    assert after(norms, np.inf)


def test_nothing_stands_out_of_too_few_norms():
    assert not after([0.9, 1.1] * 3 + [1.0], 50.0)


def filled(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(LAYOUT.size, np.float32)


def test_a_skipped_step_leaves_no_trace():
    """Neither in the moments nor in the count of updates, which the bias correction goes by."""
    kernels, parameters = load_kernels("numpy", 1), filled(1)
    optimizer = AdamW(kernels, LAYOUT, 0, LAYOUT.size, AdamWSettings())
    before = parameters.copy()
    optimizer.update(parameters, filled(2), 0.1, None)
    assert (optimizer.step, optimizer.m.any(), (parameters == before).all()) == (0, False, True)


def test_a_part_is_updated_as_within_the_whole():
    """Also where weight decay ends in the middle of it."""
    kernels, whole, gradients = load_kernels("numpy", 1), filled(1), filled(2)
    bias = LAYOUT.by_name["layer.0.qkv_bias"]
    start, stop = bias.start - 7, bias.stop + 5
    part = whole[start:stop].copy()
    settings = AdamWSettings(weight_decay=0.5)
    AdamW(kernels, LAYOUT, 0, LAYOUT.size, settings).update(whole, gradients, 0.1, 1.0)
    AdamW(kernels, LAYOUT, start, stop, settings).update(part, gradients[start:stop], 0.1, 1.0)
    assert (part == whole[start:stop]).all()


@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("cosine", {5: 0.5, 10: 1.0, 30: 0.9, 55: 0.55, 80: 0.2, 100: 0.1}),
        ("linear", {5: 0.5, 10: 1.0, 37: 0.73, 55: 0.55, 82: 0.28, 100: 0.1}),
        ("constant", {5: 0.5, 10: 1.0, 100: 1.0}),
        ("wsd", {5: 0.5, 10: 1.0, 80: 1.0, 81: 0.799, 85: 0.55, 100: 0.1}),
    ],
)
def test_the_learning_rate_over_100_steps(name, rates):
    """10 of them are the warm-up. wsd decays in the last fifth, by the square root of what of it has gone."""
    schedule = LearningRateSchedule(name, lr=1.0, min_lr=0.1, warmup=10, steps=100)
    # cosine: after 20 and 70 of 90 steps; wsd: after 1 and 5 of 20.
    exact = {("cosine", 30): 0.55 + 0.45 * np.cos(np.pi * 2 / 9), ("cosine", 80): 0.55 + 0.45 * np.cos(np.pi * 7 / 9)}
    exact |= {("wsd", 81): 0.1 + 0.9 * (1 - (1 / 20) ** 0.5)}
    for step, rate in rates.items():
        assert schedule.at(step) == pytest.approx(exact.get((name, step), rate), abs=1e-6), step
