"""gpt2/cupy_kernels/device.py and scripts/gpu_check.py on a CuPy that is none: its GPU is the CPU shim (cuda_shim)."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from cuda_shim import cases, fake_cupy
from cuda_shim.fake_cublaslt import FakeCublasLt
from cuda_shim.shim import Shim, shared_build

from gpt2.config import GPT2Config
from gpt2.cupy_kernels import cublaslt, device
from gpt2.cupy_kernels.compile import FOLDER
from gpt2.cupy_kernels.device import Device
from gpt2.errors import UserError
from gpt2.kernels import load_kernels
from traces import Tracer

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import gpu_check  # noqa: E402

SMALL = gpu_check.Sizes(
    model=GPT2Config(n_layer=2, n_head=1, n_embd=64, context=32, vocab_size=250),
    batch_sizes=(1, 2), sequence_length=32, product_batch_size=1, checked_layers=1, checked_length=32, steps=1,
    copy_bytes=4096,
)  # fmt: skip
ITEMS = [item for item in gpu_check.ITEMS if item != "compile"]  # test_cuda_kernels.py compiles
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="the CPU shim needs g++")


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    return Shim(shared_build(tmp_path_factory))


@pytest.fixture
def gpu(monkeypatch, shim):
    """install(gpus=..., capability=...) makes such a machine; one Hopper GPU to begin with."""

    def install(**machine):
        fake_cupy.install(monkeypatch, shim, **machine)

    install()
    monkeypatch.setattr(cublaslt, "open_library", lambda name: FakeCublasLt())
    monkeypatch.setattr(device, "cached_code", lambda source, storage, arch, cache: f"{source} {storage}".encode())
    return install


@pytest.mark.usefixtures("gpu")
def test_uploads_keep_their_order():
    """A copy reads its pinned memory late: the next upload must not write there before."""
    gpu_device = Device()
    for count in (5, 3, 8):
        values = np.arange(count) + 10 * count
        copy = gpu_device.upload("tokens", values.reshape(1, -1))
        assert copy.dtype == np.int32
        np.testing.assert_array_equal(gpu_device.download(copy), [values])
    first = gpu_device.upload("a", np.full(4, 1))
    gpu_device.upload("b", np.full(4, 2))
    np.testing.assert_array_equal(gpu_device.download(first), 1)


@pytest.mark.usefixtures("gpu")
def test_scratch_and_constants():
    gpu_device = Device()
    large = gpu_device.scratch("a", (4, 5), np.float32)
    assert np.shares_memory(large, gpu_device.scratch("a", (3,), np.uint16))
    assert not np.shares_memory(large, gpu_device.scratch("b", (3,), np.float32))
    one, same, other = (gpu_device.constant(np.array(x, np.int64)) for x in ([1, 2], [1, 2], [[1, 2]]))
    assert one is same
    assert other.shape == (1, 2)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("available", [None, False, True])
def test_ranges_for_a_profiler(monkeypatch, available):
    """Where CuPy has NVTX; without it, or with one that was not found, they mark nothing."""
    calls = []
    nvtx = SimpleNamespace(available=available, RangePush=calls.append, RangePop=lambda: calls.append(None))
    if available is not None:
        monkeypatch.setattr(sys.modules["cupy"].cuda, "nvtx", nvtx, raising=False)
    gpu_device = Device()
    gpu_device.range_push("forward")
    gpu_device.range_pop()
    assert calls == (["forward", None] if available else [])


@pytest.mark.usefixtures("gpu")
def test_a_tracer_takes_a_device():
    tracer = Tracer(device=Device())
    with tracer.step(1), tracer.phase("forward"):
        pass
    assert 0 <= tracer.seconds("forward") <= tracer.seconds("step")


def test_machines_without_the_gpu(gpu):
    gpu(gpus=None)
    with pytest.raises(UserError, match=r"no GPU \(cudaErrorInsufficientDriver.*--backend numpy"):
        load_kernels("cupy", 1)
    gpu(gpus=2)
    with pytest.raises(UserError, match="GPU 2 of 2: ask for fewer ranks"):
        load_kernels("cupy", 1, gpu=2)
    gpu(capability="75")
    with pytest.raises(UserError, match=r"compute capability 7\.5, expected 8\.0"):
        Device()
    gpu(capability="86")
    assert Device().arch == "sm_86"


def test_a_machine_without_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(UserError, match=r"--backend cupy: .*pip install gpt2-mpi\[gpu-cuda13\]"):
        load_kernels("cupy", 1)


@pytest.mark.usefixtures("gpu")
def test_too_much_memory_is_refused_with_what_lowers_it():
    with pytest.raises(UserError, match=r"687\.19 GB asked for, 75\.16 GB free of 150 GB: lower --batch-size"):
        Device().empty((160 << 30,), np.float32)
    with pytest.raises(UserError, match="takes 300000 bytes of shared memory, this GPU has 232448"):
        Device().launch("gelu", "float32", "gelu_backward", (1,), (32,), (), 300_000)


@needs_compiler
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("item", ITEMS)
def test_gpu_checks_items(item, capsys, monkeypatch):
    """Every line of the script but the compiler's runs here once; what it compares has to agree."""
    monkeypatch.setattr(cases, "CASES", [(name, source, sizes[:1]) for name, source, sizes in cases.CASES])
    result = gpu_check.run_item(item, SMALL)
    assert result["passed"], result
    assert "WRONG" not in "".join(result["lines"])
    printed = capsys.readouterr().out.splitlines()[-1]
    assert json.loads(printed.removeprefix(gpu_check.RESULT)) == json.loads(json.dumps(result))
    assert gpu_check.text_of(item, result | {"seconds": 1.0})[0].endswith("passed (1.0 s)")


@needs_compiler
def test_gpu_check_notices_a_wrong_kernel(gpu, tmp_path, monkeypatch):
    """A slope that is off by a tenth: the case fails with its numbers, and so do the model's gradients."""
    monkeypatch.setattr(cases, "CASES", [case for case in cases.CASES if case[1] == "gelu"])
    broken = shutil.copytree(FOLDER, tmp_path / "broken")
    text = (broken / "gelu.cu").read_text()
    wrong = text.replace("d.v[k] *= gelu_slope(x.v[k])", "d.v[k] *= 1.1f * gelu_slope(x.v[k])")
    assert wrong != text
    (broken / "gelu.cu").write_text(wrong)
    gpu()
    fake_cupy.Module.shim = Shim(tmp_path, broken)
    for item, where in (("kernels", "Mismatched"), ("model", "WRONG")):
        result = gpu_check.run_item(item, SMALL)
        assert not result["passed"]
        assert any(where in line for line in result["lines"]), result


def test_gpu_check_reports_what_is_missing(tmp_path):
    """Without a GPU: every item says why, in a line, and the rest goes on; JSON and exit code say so."""
    command = [sys.executable, str(ROOT / "scripts" / "gpu_check.py"), "--items", "environment,launches"]
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
