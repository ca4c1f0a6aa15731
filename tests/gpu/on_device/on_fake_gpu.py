"""Run a script whose CuPy is the tests' own, and its GPU the CPU shim (tests/gpu/cuda_shim).

    python tests/gpu/on_device/on_fake_gpu.py BUILD SCRIPT ARGUMENTS...

BUILD: a folder for the shim's compiled kernels, filled as they are needed.
"""

import argparse
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[3]


def install(monkeypatch, build: Path) -> None:
    """One Hopper GPU, cuBLASLt and a compiler that are none."""
    from gpt2.kernels.cupy import cublaslt, device
    from tests.gpu.cuda_shim import fake_cupy
    from tests.gpu.cuda_shim.fake_cublaslt import FakeCublasLt
    from tests.gpu.cuda_shim.shim import Shim

    fake_cupy.install(monkeypatch, Shim(build))
    pool = SimpleNamespace(total_bytes=lambda: 1 << 30, free_all_blocks=lambda: None)
    monkeypatch.setattr(sys.modules["cupy"], "get_default_memory_pool", lambda: pool, raising=False)
    monkeypatch.setattr(cublaslt, "open_library", lambda name: FakeCublasLt())
    monkeypatch.setattr(device, "cached_code", lambda source, storage, arch, cache: f"{source} {storage}".encode())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", metavar="BUILD", type=Path)
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("arguments", metavar="ARGUMENTS", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    sys.argv[:] = [asked.script, *asked.arguments]
    sys.path[:1] = [str(Path(asked.script).parent), str(ROOT)]
    install(pytest.MonkeyPatch(), asked.build)
    runpy.run_path(asked.script, run_name="__main__")
