"""The whole model against PyTorch: logits, loss, every named gradient, ten optimizer steps (tests/fixtures)."""

import itertools
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from gpt2.config import GPT2Config
from gpt2.kernels import load_kernels
from gpt2.model import new_model
from gpt2.optimizer import AdamW, AdamWSettings, clip_scale
from tests.support.logits import logits_of

FIXTURE = np.load(Path(__file__).parents[1] / "fixtures" / "tiny_gpt2.npz")
NAMES = [key[2:] for key in FIXTURE.files if key.startswith("p/")]


@pytest.fixture(params=[1, 3], ids="{} threads".format)
def model(request):
    config = GPT2Config(*(int(number) for number in FIXTURE["shape"]))
    B, T = FIXTURE["batches"].shape[1], FIXTURE["batches"].shape[2] - 1
    model = new_model(config, load_kernels("numpy", request.param), B, T)
    for name in NAMES:
        value = FIXTURE[f"p/{name}"]
        model.parameters.view(name)[: len(value)] = value
    return model


def batch(step):
    tokens = FIXTURE["batches"][step].astype(np.int32)
    return tokens[:, :-1], tokens[:, 1:]


def relative_error(ours, reference):
    return np.abs(ours - reference).max() / np.abs(reference).max()


def test_names_are_the_layouts(model):
    assert [tensor.name for tensor in model.parameters.layout.tensors] == NAMES


def test_logits_and_loss_without_gradients(model):
    tokens, targets = batch(0)
    assert relative_error(logits_of(model, tokens), FIXTURE["logits"]) < 1e-5
    assert model.token_losses(tokens, targets).mean() == pytest.approx(FIXTURE["losses"][0], abs=2e-6)


@pytest.mark.parametrize("micro_steps", [1, 2])
def test_every_gradient(model, micro_steps):
    """Two micro-steps of the same batch at half the scale add up to one; what an earlier step left does not count."""
    tokens, targets = batch(0)
    model.gradients.flat[:] = 1e3
    for micro_step in range(micro_steps):
        loss = model.forward(tokens, targets, 1.0 / (tokens.size * micro_steps)) / tokens.size
        model.backward(accumulate=micro_step > 0)
    assert loss == pytest.approx(FIXTURE["losses"][0], abs=2e-6)
    for name in NAMES:
        reference = FIXTURE[f"g/{name}"]
        assert relative_error(model.gradients.view(name)[: len(reference)], reference) < 1e-4, name
    assert not model.gradients.wte[model.config.vocab_size :].any(), "pad rows must get no gradient"


def test_ten_optimizer_steps(model):
    lr, beta1, beta2, eps, weight_decay, clip = FIXTURE["adamw"].tolist()
    layout = model.parameters.layout
    optimizer = AdamW(model.kernels, layout, 0, layout.size, AdamWSettings(beta1, beta2, eps, weight_decay))
    gradients = model.gradients.flat
    for step in range(len(FIXTURE["losses"])):
        tokens, targets = batch(step)
        loss = model.forward(tokens, targets, 1.0 / tokens.size) / tokens.size
        model.backward(accumulate=False)
        norm, scale = clip_scale(model.kernels.sum_of_squares(gradients), clip)
        optimizer.update(model.parameters.flat, gradients, lr, scale)
        assert loss == pytest.approx(FIXTURE["losses"][step], abs=2e-5)
        assert norm == pytest.approx(FIXTURE["norms"][step], rel=1e-4)
    for name in NAMES:
        if name.endswith("qkv_bias"):  # the loss does not depend on the key bias: AdamW steps along rounding noise
            continue
        assert np.linalg.norm(model.parameters.view(name)) == pytest.approx(float(FIXTURE[f"n/{name}"]), rel=1e-5), name
    assert not model.parameters.wte[model.config.vocab_size :].any(), "pad rows must stay zero"


def test_gradients_become_final_from_the_end_to_the_start(model):
    """The hook's ranges tile the whole buffer, each holding its last value when it is called."""
    tokens, targets = batch(0)
    model.forward(tokens, targets, 1.0 / tokens.size)
    seen = []
    model.backward(False, lambda start, stop: seen.append((start, stop, model.gradients.flat[start:stop].copy())))
    assert seen[0][1] == model.parameters.layout.size
    assert seen[-1][0] == 0
    assert all(later[1] == earlier[0] for earlier, later in itertools.pairwise(seen))
    assert len(seen) == 2 * model.config.n_layer + 2
    for start, stop, value in seen:
        np.testing.assert_array_equal(value, model.gradients.flat[start:stop])


@pytest.mark.parametrize("threads", [1, 2])
def test_a_steady_step_allocates_little(threads):
    """After the first step no large array is made: what NumPy asks for at once stays far below the activations."""
    config = GPT2Config(n_layer=2, n_head=4, n_embd=128, context=128, vocab_size=500)
    model = new_model(config, load_kernels("numpy", threads), 8, 128)
    tokens = np.random.default_rng(2).integers(500, size=(8, 128)).astype(np.int32)
    optimizer = AdamW(model.kernels, model.parameters.layout, 0, model.parameters.layout.size, AdamWSettings())

    def step():
        for accumulate in (False, True):
            model.forward(tokens, tokens, 1.0 / tokens.size)
            model.backward(accumulate)
        optimizer.update(model.parameters.flat, model.gradients.flat, 1e-3, 0.5)

    step()
    tracemalloc.start()
    try:
        step()
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    saved = [array for layer in model.kept[0].layers for array in vars(layer).values()]
    saved += [array for norm in saved if isinstance(norm, SimpleNamespace) for array in vars(norm).values()]
    activation_bytes = sum(array.nbytes for array in saved if isinstance(array, np.ndarray))
    print(f"{peak_bytes} bytes at once, {activation_bytes} of activations")
    assert peak_bytes < activation_bytes / 20
