"""What a worker does in a step: which windows it takes, how its micro-steps add up, and what it says is final."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from gpt2.config import GPT2Config
from gpt2.data.windows import Windows
from gpt2.kernels import load_kernels
from gpt2.model import GPT2
from gpt2.parameters import Layout, Parameters, initialize
from gpt2.pipeline import SCHEDULES
from scripts.training.worker import Worker

CONFIG = GPT2Config(n_layer=1, n_head=1, n_embd=4, context=5, vocab_size=9)
LENGTH, BATCH = 5, 2
TOKENS = np.random.default_rng(2).integers(9, size=1000).astype(np.uint16)
KERNELS = load_kernels("numpy", 1)
TRACER = SimpleNamespace(phase=lambda name: nullcontext())


def new_model(batch):
    layout = Layout(CONFIG)
    parameters, gradients = Parameters.zeros(layout), Parameters.zeros(layout)
    initialize(parameters, seed=1)
    gradients.flat.fill(1e6)  # what the step before has left
    return GPT2(KERNELS, parameters, gradients, batch, LENGTH), gradients.flat, layout


def reference(numbers, scale):
    """Loss and gradients of these windows, in one batch: window i begins at token 5 i, where nothing is shuffled."""
    tokens = np.stack([TOKENS[LENGTH * i : LENGTH * (i + 1) + 1] for i in numbers]).astype(np.int32)
    model, gradients, _ = new_model(len(numbers))
    loss = model.forward(tokens[:, :-1], tokens[:, 1:], scale) * scale
    model.backward(False)
    return loss, gradients


def new_worker(micro_steps, worker, workers, keeps=True):
    model, gradients, layout = new_model(BATCH)
    windows = Windows([TOKENS], LENGTH)
    return (
        Worker(model, windows, None, SCHEDULES["1f1b"](0, 1, micro_steps), worker, workers, TRACER, keeps),
        gradients,
        layout,
    )


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("worker", [0, 1, 2])
def test_a_worker_takes_its_part_of_every_global_batch(step, worker):
    """3 workers in 2 micro-steps of 2: the third step begins at window 24, and worker 1's part 4 windows later."""
    one, gradients, _ = new_worker(2, worker, 3)
    first = 12 * (step - 1) + 4 * worker
    scale = 1 / (12 * LENGTH)
    loss, expected = reference(range(first, first + 4), scale)
    assert one.forward_backward(step, lambda start, stop: None) == pytest.approx(loss, rel=1e-6)
    np.testing.assert_allclose(gradients, expected, atol=1e-6)


def test_gradients_are_final_in_the_last_micro_step():
    one, gradients, layout = new_worker(3, 0, 1)
    said = []
    one.forward_backward(1, lambda start, stop: said.append((start, stop, gradients[start:stop].copy())))
    assert [(start, stop) for start, stop, _ in said] == list(layout.final_ranges())
    for start, stop, values in said:
        np.testing.assert_array_equal(gradients[start:stop], values)


def test_gradients_that_are_taken_away_are_written_anew_in_each_micro_step():
    """As of a strategy that does not keep them: their sum over the calls is the step's."""
    one, gradients, layout = new_worker(3, 0, 1, keeps=False)
    total, calls = np.zeros(layout.size), []

    def final(start, stop):
        calls.append((start, stop))
        total[start:stop] += gradients[start:stop]

    loss, expected = reference(range(6), 1 / (6 * LENGTH))
    assert one.forward_backward(1, final) == pytest.approx(loss, rel=1e-6)
    assert calls == list(layout.final_ranges()) * 3
    np.testing.assert_allclose(total, expected, atol=1e-6)
