"""Whole models on a GPU: against PyTorch's fixture, and at GPT-2's full width against NumPy."""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from gpt2.config import PRESETS
from gpt2.errors import UserError
from gpt2.kernels import bind, load_kernels
from gpt2.kernels import cupy as cupy_kernels
from gpt2.kernels.cupy.matmul import NoAlgorithm
from gpt2.model import new_model
from gpt2.parameters import initialize
from tests.gpu.cuda_shim.memory import to_bfloat16, widen
from tests.support.pytorch_fixture import FixtureModel

pytestmark = [pytest.mark.gpu, pytest.mark.own_process]
OF_THE_NORM = {"float32": 1e-3, "bfloat16": 0.03}  # how far a gradient may be off at full width
CONFIG, B, T = replace(PRESETS["gpt2-124M"], n_layer=2), 2, 256


def read(device, array):
    """A host copy as floats."""
    host = device.download(array)
    return widen(host.view(np.uint16) if host.itemsize == 2 else host)


def fixture_model(device, storage):
    from scripts.machine.gpu import dtype_of, on_gpu

    return FixtureModel(
        "heads_of_64", bind(cupy_kernels, device), dtype_of(storage),
        put=lambda values: on_gpu(device, values, storage), read=lambda array: read(device, array),
    )  # fmt: skip


def test_pytorchs_fixture_in_float32(new_device):
    model = fixture_model(new_device(), "float32")
    model.assert_logits(1e-5)
    model.assert_gradients(1e-5, 1e-4)
    model.assert_steps(10, 1e-4, 1e-3)


def test_pytorchs_fixture_in_bfloat16(new_device):
    model = fixture_model(new_device(), "bfloat16")
    model.assert_logits(0.02)
    model.assert_gradients(2e-3, 0.03)
    model.assert_steps(10, 1e-2, 0.05)


@pytest.mark.parametrize(
    ("storage", "options"),
    [
        ("float32", {"epilogues": "never"}),
        ("float32", {"epilogues": "faster"}),
        ("bfloat16", {"epilogues": "never", "attention": "own"}),
        ("bfloat16", {"epilogues": "always"}),
        ("bfloat16", {"attention": "cudnn"}),
    ],
    ids=str,
)
def test_full_width(new_device, storage, options):
    """Two layers of GPT-2 124M: loss and every gradient after two micro-steps."""
    with unsupported_is_said():
        device = new_device(**options)
    reference = new_model(CONFIG, load_kernels("numpy", 8), B, T)
    initialize(reference.parameters, seed=3)
    ours = on_the_gpu(device, reference, storage)
    random = np.random.default_rng(5)
    for micro_step in range(2):
        tokens = random.integers(CONFIG.vocab_size, size=(B, T + 1)).astype(np.int32)
        with unsupported_is_said():
            losses = [m.forward(tokens[:, :-1], tokens[:, 1:], 0.5 / (B * T)) for m in (ours, reference)]
            for m in (ours, reference):
                m.backward(accumulate=micro_step > 0)
        assert losses[0] == pytest.approx(losses[1], rel=1e-4 if storage == "float32" else 1e-2)
    gradients = read(device, ours.gradients.flat)
    for tensor in ours.parameters.layout.tensors:
        got, expected = (flat[tensor.start : tensor.stop] for flat in (gradients, reference.gradients.flat))
        if tensor.name.endswith("qkv_bias"):  # the loss does not depend on the key biases
            got, expected = (np.delete(values, slice(CONFIG.n_embd, 2 * CONFIG.n_embd)) for values in (got, expected))
        error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
        assert error < OF_THE_NORM[storage], tensor.name


@contextmanager
def unsupported_is_said():
    """What this cuBLASLt or a missing cuDNN lacks is no failure: training takes our own kernel there."""
    try:
        yield
    except (NoAlgorithm, UserError) as error:
        pytest.skip(f"unsupported: {error}")


def on_the_gpu(device, reference, storage):
    """The reference's model on the GPU; both then hold the storage's values."""
    from scripts.machine.gpu import dtype_of, on_gpu

    flat = reference.parameters.flat
    if storage == "bfloat16":
        flat[:] = widen(to_bfloat16(flat))
    ours = new_model(CONFIG, bind(cupy_kernels, device), B, T, dtype_of(storage))
    ours.parameters.flat[:] = on_gpu(device, flat, storage)
    return ours
