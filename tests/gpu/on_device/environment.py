"""Print what `make test-gpu` reports of a machine, as JSON: the GPU, its driver, and what is installed.

python -m tests.gpu.on_device.environment
"""

import json
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from gpt2.errors import UserError
from gpt2.kernels.cupy import Device
from gpt2.kernels.cupy.compile import nvrtc_version
from scripts.machine.gpu import gpu_facts
from scripts.settings.command_line import Parser

PACKAGES = (
    "cupy-cuda13x", "cupy-cuda12x", "ml_dtypes", "numpy", "numba", "mpi4py", "torch", "nvidia-cublas",
    "nvidia-cublas-cu12", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-frontend", "nvidia-nccl-cu13",
    "nvidia-cuda-nvrtc",
)  # fmt: skip


def environment() -> dict:
    """UserError where no GPU can be used."""
    return gpu_facts(Device()) | {"NVRTC": _nvrtc_version(), "NCCL for CuPy": _nccl_version()} | _packages()


def _packages() -> dict:
    found = dict.fromkeys(PACKAGES, "not installed")
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _nvrtc_version() -> str:
    try:
        return ".".join(map(str, nvrtc_version()))
    except UserError as error:
        return str(error)


def _nccl_version() -> int | str:
    try:
        from cupy.cuda import nccl

        return nccl.get_version() if nccl.available else "not found"
    except ImportError as error:
        return str(error)


if __name__ == "__main__":
    Parser(__doc__).parse_args()
    try:
        print(json.dumps(environment()))
    except UserError as error:
        raise SystemExit(str(error)) from None
