"""gpt2/kernels/cupy/device.py on a CuPy that is none: its GPU is the CPU shim (cuda_shim)."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from gpt2.config import GPT2Config
from gpt2.errors import UserError
from gpt2.formats import llmc
from gpt2.kernels import load_kernels
from gpt2.kernels.cupy import cublaslt, device
from gpt2.kernels.cupy.device import Device
from gpt2.parameters import Layout, Parameters
from scripts import sample
from tests.gpu.cuda_shim import fake_cupy
from tests.gpu.cuda_shim.fake_cublaslt import FakeCublasLt
from traces import Tracer


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
def test_the_stream_stays_the_current_one():
    """When a `with` of another stream has ended, and when CuPy has entered one for an array with gaps."""
    gpu_device = Device()
    array = gpu_device.empty((4, 6), np.float32)
    with fake_cupy.Stream(non_blocking=True):
        pass
    assert fake_cupy.Stream.current is gpu_device.stream
    assert gpu_device.download(array[:, ::2]).shape == (4, 3)
    assert fake_cupy.Stream.current is gpu_device.stream


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("tf32", [False, True])
def test_tf32_is_asked_of_cublaslt(tf32):
    """The compute type of its descriptors; the header's numbers."""
    kernels = load_kernels("cupy", 1, tf32=tf32)
    out, x, w = (kernels.empty(shape) for shape in ((8, 12), (8, 16), (12, 16)))
    kernels.linear_forward(out, x, w, None)
    (plan,) = kernels.device.matmul.plans.values()
    compute, _ = plan._library._library.objects[plan.descriptor.pointer.value]["arguments"]
    assert compute == (77 if tf32 else 68)


@pytest.mark.usefixtures("gpu")
def test_scratch_and_constants():
    gpu_device = Device()
    large = gpu_device.scratch("a", (4, 5), np.float32)
    assert np.shares_memory(large, gpu_device.scratch("a", (3,), np.uint16))
    assert not np.shares_memory(large, gpu_device.scratch("b", (3,), np.float32))
    assert np.shares_memory(gpu_device.workspace("a", 80), large)
    gpu_device.spare = gpu_device.empty((4, 6), np.uint16)
    assert np.shares_memory(gpu_device.workspace("a", 48), gpu_device.spare)
    assert np.shares_memory(gpu_device.workspace("a", 49), large), "it does not fit"
    one, same, other = (gpu_device.constant(np.array(x, np.int64)) for x in ([1, 2], [1, 2], [[1, 2]]))
    assert one is same
    assert other.shape == (1, 2)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("available", [None, False, True])
def test_ranges_for_a_profiler(monkeypatch, available):
    """A device marks them where CuPy has NVTX and found its library."""
    calls = []
    nvtx = SimpleNamespace(available=available, RangePush=calls.append, RangePop=lambda: calls.append(None))
    if available is not None:
        monkeypatch.setattr(sys.modules["cupy"].cuda, "nvtx", nvtx, raising=False)
    gpu_device = Device()
    assert hasattr(gpu_device, "range_push") == hasattr(gpu_device, "range_pop") == bool(available)
    if available:
        gpu_device.range_push("forward")
        gpu_device.range_pop()
        assert calls == ["forward", None]


@pytest.mark.usefixtures("gpu")
def test_a_tracer_takes_a_device():
    tracer = Tracer(device=Device())
    with tracer.step(1), tracer.phase("forward"):
        pass
    assert 0 <= tracer.seconds("forward") <= tracer.seconds("step")


def test_sample_py_writes_the_same_text_as_on_cores(gpu, tmp_path, capsys):
    """By its own choice, too; in bfloat16 the text begins as in float32."""
    parameters = Parameters.zeros(Layout(GPT2Config(n_layer=2, n_head=1, n_embd=64, context=32, vocab_size=256)))
    parameters.flat[:] = np.random.default_rng(4).normal(0, 0.3, parameters.flat.shape)
    llmc.write_parameters(tmp_path / "model.bin", parameters)

    def written(*flags):
        arguments = [str(tmp_path / "model.bin"), "--prompt", "Once ", "--tokens", "40", *flags]
        assert sample.main(arguments) == 0
        return capsys.readouterr()

    on_cores, by_itself = written("--backend", "numpy"), written()
    assert written("--backend", "cupy").out == by_itself.out == on_cores.out
    assert "computing on shim, in float32\n" in by_itself.err
    in_bfloat16 = written("--dtype", "bfloat16", "--temperature", "0")
    assert in_bfloat16.out[:7] == written("--temperature", "0").out[:7]
    assert "computing on shim, in bfloat16\n" in in_bfloat16.err
    gpu(gpus=None)
    without = written()
    assert without.out == on_cores.out
    assert "CPU cores (--backend cupy: no GPU (cudaErrorInsufficientDriver" in without.err
    assert sample.main([str(tmp_path / "model.bin"), "--backend", "cupy"]) == 2
    assert capsys.readouterr().err.startswith("sample.py: error: --backend cupy: no GPU (")


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
