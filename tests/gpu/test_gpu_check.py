"""on_device/gpu_check.py on a CuPy that is none: its GPU is the CPU shim (cuda_shim)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpt2.config import GPT2Config
from gpt2.kernels.cupy import Device, cublaslt
from gpt2.kernels.numpy import Cores
from tests.gpu.cuda_shim import cases
from tests.gpu.cuda_shim.fake_cublaslt import FakeCublasLt
from tests.gpu.cuda_shim.shim import lasting_build
from tests.gpu.on_device import conftest, gpu_check
from tests.gpu.on_device.mirror import Mirror
from tests.gpu.on_device.on_fake_gpu import install

ROOT = Path(__file__).parents[2]

SMALL = gpu_check.Sizes(
    model=GPT2Config(n_layer=2, n_head=1, n_embd=64, context=32, vocab_size=250),
    batch_size=1, sequence_length=32, copy_bytes=4096,
)  # fmt: skip
ITEMS = [item for item in gpu_check.ITEMS if item != "compile"]  # test_cuda_kernels.py compiles


@pytest.mark.parametrize("item", ITEMS)
def test_each_item(item, capsys, monkeypatch):
    """Every line of the script but the compiler's runs here once; what it compares has to agree."""
    install(monkeypatch, lasting_build())
    result = gpu_check.run_item(item, SMALL)
    assert result["passed"], result
    printed = capsys.readouterr().out.splitlines()[-1]
    assert json.loads(printed.removeprefix(gpu_check.RESULT)) == json.loads(json.dumps(result))
    assert gpu_check.text_of(item, result | {"seconds": 1.0})[0].endswith("passed (1.0 s)")


def test_an_array_that_is_passed_twice_is_one(monkeypatch):
    """Where the mirror would copy it twice, the copy that no kernel has written would come back last."""
    install(monkeypatch, lasting_build())
    cases.run(Mirror(Device()), Cores(1), "add_case", "float32", (7, 40, "in place"))


def test_an_epilogue_that_is_missing_is_reported(monkeypatch):
    """The item passes: there is a kernel of ours for it."""
    install(monkeypatch, lasting_build())
    monkeypatch.setattr(cublaslt, "open_library", lambda name: FakeCublasLt([cublaslt.EPILOGUES["bgradb"]]))
    result = gpu_check.run_item("products", SMALL)
    assert result["passed"], result
    (line,) = (line for line in result["lines"] if line.startswith("name bgradb"))
    assert "fused cuBLASLt has no algorithm" in line
    assert "apart_ms" in line


def test_time_for_a_cold_disk():
    """Products read 540 MB of cuBLASLt first: at 10 MB/s that leaves as long for them. No test is cut short before."""
    assert gpu_check.ITEMS["products"] >= 2 * 540 / 10
    assert max(gpu_check.ITEMS.values()) <= conftest.TEST_LIMIT_S < conftest.LIMIT_S <= 9 * 60


def test_what_is_missing_is_reported(tmp_path):
    """Without a GPU: every item says why, in a line, and the rest goes on; JSON and exit code say so."""
    command = [sys.executable, "-m", "tests.gpu.on_device.gpu_check", "--items", "environment,launches"]
    process = subprocess.run([*command, "--json", str(tmp_path / "gpu.json")], capture_output=True, text=True)
    if process.returncode == 0:
        pytest.skip("there is a GPU")
    assert process.returncode == 1
    assert "0 of 2 items passed" in process.stdout
    assert process.stdout.count("--backend cupy: ") == 2
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert [report[item]["passed"] for item in ("environment", "launches")] == [False, False]


def test_an_item_that_hangs_is_a_result(monkeypatch):
    monkeypatch.setitem(gpu_check.ITEMS, "environment", 0.01)
    assert gpu_check.run_process("environment")["error"] == "not done after 0.01 s"


def test_an_unknown_item_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--items", "everything"])
    with pytest.raises(SystemExit):
        gpu_check.parse()
    assert "everything: expected some of environment,compile" in capsys.readouterr().err
