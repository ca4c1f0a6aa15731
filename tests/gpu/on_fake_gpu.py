"""Run a script whose CuPy is the tests' own, and its GPU the CPU shim (tests/cuda_shim).

    python tests/gpu/on_fake_gpu.py BUILD SCRIPT ARGUMENTS...

BUILD: a folder for the shim's compiled kernels, filled as they are needed.
"""

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

TESTS = Path(__file__).resolve().parent.parent


def install(monkeypatch, build: Path) -> None:
    """One Hopper GPU, cuBLASLt and a compiler that are none."""
    from cuda_shim import fake_cupy
    from cuda_shim.fake_cublaslt import FakeCublasLt
    from cuda_shim.shim import Shim

    from gpt2.cupy_kernels import cublaslt, device

    fake_cupy.install(monkeypatch, Shim(build))
    pool = SimpleNamespace(total_bytes=lambda: 1 << 30)
    monkeypatch.setattr(sys.modules["cupy"], "get_default_memory_pool", lambda: pool, raising=False)
    monkeypatch.setattr(cublaslt, "open_library", lambda name: FakeCublasLt())
    monkeypatch.setattr(device, "cached_code", lambda source, storage, arch, cache: f"{source} {storage}".encode())


if __name__ == "__main__":
    _, build, script, *arguments = sys.argv
    sys.argv[:] = [script, *arguments]
    sys.path[:1] = [str(Path(script).parent), str(TESTS), str(TESTS.parent)]
    install(pytest.MonkeyPatch(), Path(build))
    runpy.run_path(script, run_name="__main__")
