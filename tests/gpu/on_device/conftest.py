"""Tests that need a GPU, for `make test-gpu`: they skip where there is none, or fail where a report was asked for.

A test marked `own_process` runs in one, with a time limit: a kernel that faults spoils its process's GPU, one that
hangs cannot be stopped from inside, and the tests after it are to run all the same. All of them end within LIMIT_S.
"""

import importlib.util
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.gpu.on_device.report import GpuReport

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 540  # of the whole session: nine minutes are promised
TEST_LIMIT_S = 120  # a cold machine reads 540 MB of cuBLASLt first
STARTED = time.monotonic()


def pytest_addoption(parser):
    parser.addoption("--gpu-report", type=Path, help="write JSON there; a machine without a GPU is a failure then")
    parser.addoption("--fake-gpu", type=Path, help="no GPU but the CPU shim, whose kernels are built in this folder")
    parser.addoption("--own-process", action="store_true", help="this pytest is a test's own process")


def pytest_configure(config):
    file = config.getoption("--gpu-report", None)
    if file:
        config.pluginmanager.register(GpuReport(file), "gpu-report")


@pytest.fixture(scope="session")
def fake_gpu(pytestconfig):
    """The folder for the shim's kernels, or None on a GPU."""
    return pytestconfig.getoption("--fake-gpu", None)


@pytest.fixture(scope="session", autouse=True)
def machine(pytestconfig, fake_gpu):
    """Skips, or fails, where there is no GPU; else what environment.py finds is in the report."""
    if fake_gpu or pytestconfig.getoption("--own-process", False):
        return
    facts, error = find_gpu()
    report = pytestconfig.pluginmanager.get_plugin("gpu-report")
    if report:
        report.put_machine(facts)
    if error:
        (pytest.fail if report else pytest.skip)(error)


def find_gpu() -> tuple[dict, str | None]:
    """What is found, and why nothing is; in a process of its own, so that this one stays off the GPU."""
    if importlib.util.find_spec("cupy") is None:
        return {}, "no CuPy here: pip install -e '.[gpu-cuda13]' on a machine with an NVIDIA GPU"
    command = [sys.executable, "-m", "tests.gpu.on_device.environment"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=TEST_LIMIT_S)
    except subprocess.TimeoutExpired:
        return {}, f"the GPU does not answer in {TEST_LIMIT_S} s"
    return (json.loads(result.stdout), None) if result.returncode == 0 else ({}, result.stderr[-2000:])


@pytest.fixture
def new_device(pytestconfig, fake_gpu, monkeypatch):
    """gpt2.kernels.cupy.Device; None in the outer pytest, which does not run the test itself."""
    if not pytestconfig.getoption("--own-process", False):
        return None
    if fake_gpu:
        from tests.gpu.on_device.on_fake_gpu import install

        install(monkeypatch, fake_gpu)
    from gpt2.kernels.cupy import Device

    return Device


@pytest.fixture
def seconds_left():
    """seconds_left(): what the test may take; fails where there are none."""
    return time_left


def time_left() -> float:
    left_s = LIMIT_S - (time.monotonic() - STARTED)
    if left_s <= 0:
        pytest.fail(f"not run: the {LIMIT_S} s of all GPU tests are used up", pytrace=False)
    return min(left_s, TEST_LIMIT_S)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """In the outer pytest, start a test marked `own_process` instead of calling it."""
    config = pyfuncitem.config
    if not pyfuncitem.get_closest_marker("own_process") or config.getoption("--own-process", False):
        return None
    fake = config.getoption("--fake-gpu", None)
    options = ["-x", "-q", "-rs", "--own-process", *(["--fake-gpu", str(fake)] if fake else [])]
    command = [sys.executable, "-m", "pytest", *options]
    limit_s = time_left()
    try:
        result = subprocess.run(
            [*command, pyfuncitem.nodeid], capture_output=True, text=True, cwd=ROOT, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        pytest.fail(f"not done after {limit_s:.0f} s", pytrace=False)
    if skipped := re.search(r"^SKIPPED \[1\] \S+ (.*)", result.stdout, re.MULTILINE):
        pytest.skip(skipped[1])
    if result.returncode or "1 passed" not in result.stdout:
        pytest.fail(f"exit code {result.returncode}\n{result.stdout[-6000:]}{result.stderr[-3000:]}", pytrace=False)
    return True
