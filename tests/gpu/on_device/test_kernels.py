"""Every kernel against NumPy in both storages, on the cases that the CPU shim runs too."""

from itertools import product

import pytest

from gpt2.kernels.cupy.compile import STORAGES
from gpt2.kernels.numpy import Cores
from tests.gpu.cuda_shim import cases
from tests.gpu.on_device.mirror import Mirror

pytestmark = [pytest.mark.gpu, pytest.mark.own_process]
SIZES = {name: sizes for name, _, sizes in cases.CASES}


@pytest.mark.parametrize("name", SIZES)
def test_kernel(new_device, name):
    """In both storages: as NumPy has it, the same bits the second time, and nothing written beside an array."""
    device = Mirror(new_device())
    for storage, sizes in product(STORAGES, SIZES[name]):
        first, again = (cases.run(device, Cores(1), name, storage, sizes) for _ in range(2))
        assert all(a.tobytes() == b.tobytes() for a, b in zip(first, again, strict=True)), (storage, sizes)
