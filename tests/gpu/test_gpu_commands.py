"""`make test-gpu` without a GPU: its tests on the fake one, what it writes, and what it says where there is none."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gpt2.kernels.cupy import Device
from gpt2.kernels.cupy.compile import FOLDER
from gpt2.kernels.numpy import Cores
from tests.gpu.cuda_shim import cases
from tests.gpu.cuda_shim.shim import Shim, lasting_build
from tests.gpu.on_device.environment import environment
from tests.gpu.on_device.mirror import Mirror
from tests.gpu.on_device.on_fake_gpu import install

ROOT = Path(__file__).parents[2]

GELU = "tests/gpu/on_device/test_kernels.py::test_kernel[gelu_case]"
TRAINING = "tests/gpu/on_device/test_training.py::test_two_ranks_on_one_gpu"
FIXTURE = "tests/gpu/on_device/test_model.py::test_pytorchs_fixture_in_bfloat16"


def run_pytest(*arguments):
    command = [sys.executable, "-m", "pytest", "-q", "-rs", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=180)


def test_kernels_on_the_fake_gpu(tmp_path):
    """One that is right, then the same with a slope that is off by a tenth: its numbers are in the report."""
    file, build = tmp_path / "runs" / "gpu.json", lasting_build()
    result = run_pytest(GELU, "--fake-gpu", build, "--gpu-report", file)
    assert result.returncode == 0, result.stdout
    assert json.loads(file.read_text())["summary"] == {"passed": 1}
    broken = shutil.copytree(FOLDER, tmp_path / "broken")
    text = (broken / "gelu.cu").read_text()
    wrong = text.replace("d.v[k] *= gelu_slope(x.v[k])", "d.v[k] *= 1.1f * gelu_slope(x.v[k])")
    assert wrong != text
    (broken / "gelu.cu").write_text(wrong)
    Shim(tmp_path, broken)._library("gelu", "float32")
    assert run_pytest(GELU, "--fake-gpu", tmp_path, "--gpu-report", file).returncode == 1
    report = json.loads(file.read_text())
    assert report["summary"] == {"failed": 1}
    assert "Mismatched elements" in report["tests"][GELU]["error"]


def test_training_on_the_fake_gpu(tmp_path):
    result = run_pytest(TRAINING, "--fake-gpu", lasting_build())
    assert result.returncode == 0, result.stdout


def test_the_report_names_the_gpu(monkeypatch):
    install(monkeypatch, lasting_build())
    found = environment()
    assert found["GPU"] == Device().cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    assert found["numpy"] == np.__version__


def test_an_array_that_is_passed_twice_is_one(monkeypatch):
    """Where the mirror would copy it twice, the copy that no kernel has written would come back last."""
    install(monkeypatch, lasting_build())
    cases.run(Mirror(Device()), Cores(1), "add_case", "float32", (7, 40, "in place"))


@pytest.mark.parametrize("carried", ["", "/carried"])
def test_make_keeps_the_path_that_it_is_given(carried):
    """A machine without a network gets what it lacks, cuDNN's frontend, by PYTHONPATH."""
    environment = {"PATH": os.environ["PATH"]} | ({"PYTHONPATH": carried} if carried else {})
    command = ["make", "-s", "test-gpu", "PYTHON=printenv PYTHONPATH #"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=60)
    assert result.stdout.strip() == ":".join(filter(None, (str(ROOT), carried)))


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed here")
def test_without_a_gpu(tmp_path):
    """A report that was asked for fails; plain tests skip, saying why, and nothing imports CuPy."""
    file = tmp_path / "gpu.json"
    assert run_pytest("tests/gpu/on_device/test_compilation.py", "--gpu-report", file).returncode == 1
    report = json.loads(file.read_text())
    assert report["summary"] == {"failed": 1}
    assert all("no CuPy here" in test["error"] for test in report["tests"].values())
    skipped = run_pytest("tests/gpu/on_device")
    assert skipped.returncode == 0
    assert "no CuPy here: pip install" in skipped.stdout
    assert "passed" not in skipped.stdout.splitlines()[-1]
