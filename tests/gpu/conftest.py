"""What tests of GPUs that are none share: the kernels on a CPU, and trainings on them."""

import pytest

from tests.gpu.cuda_shim.shim import Shim, lasting_build
from tests.gpu.gpu_trainer import Trainer


@pytest.fixture(scope="session")
def shim():
    return Shim(lasting_build())


@pytest.fixture
def trainer(comm, monkeypatch, shared_path):
    return None if comm is None else Trainer(comm, monkeypatch, shared_path)
