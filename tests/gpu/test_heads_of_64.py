"""The fixture whose head size the CUDA kernels have, against PyTorch: on NumPy, and on those kernels on a CPU.

tests/gpu/on_device/test_model.py has the same on a GPU.
"""

import numpy as np
import pytest

from gpt2.kernels import bind, load_kernels
from gpt2.kernels import cupy as cupy_kernels
from tests.gpu.cuda_shim.memory import to_bfloat16, widen
from tests.support.pytorch_fixture import FixtureModel


def test_on_numpy():
    kernels = load_kernels("numpy", 2)
    model = FixtureModel("heads_of_64", kernels, np.float32, np.asarray, np.asarray)
    model.assert_logits(1e-5)
    model.assert_gradients(1e-6, 1e-5)
    model.assert_steps(10, 1e-5, 1e-4)


@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
def test_on_the_cuda_kernels(shim, storage):
    kernels = bind(cupy_kernels, shim)
    if storage == "float32":
        model = FixtureModel("heads_of_64", kernels, np.float32, np.asarray, widen)
        model.assert_logits(1e-5)
        model.assert_gradients(1e-6, 1e-5)
    else:
        model = FixtureModel("heads_of_64", kernels, np.uint16, to_bfloat16, widen)
        model.assert_logits(0.02)
        model.assert_gradients(2e-3, 0.03)
