"""A library's way or ours: the faster one by the clock, and the same values either way."""

import json
import math
import sys

import numpy as np
import pytest

from gpt2.errors import UserError
from gpt2.kernels import bind, load_kernels
from gpt2.kernels import cupy as cupy_kernels
from gpt2.kernels.cupy import cublaslt, device
from gpt2.kernels.cupy.faster_of import FasterOf
from tests.gpu.cuda_shim import fake_cudnn, fake_cupy
from tests.gpu.cuda_shim.fake_cublaslt import FakeCublasLt
from tests.gpu.cuda_shim.fake_cupy import ndarray
from tests.gpu.cuda_shim.memory import to_bfloat16, widen
from tests.gpu.cuda_shim.shim import Shim, lasting_build
from tests.gpu.on_device.test_model import unsupported_is_said

N, C, HIDDEN = 24, 16, 40
B, T, HEADS, WIDTH = 2, 70, 2, 128
OUT = {"float32": np.empty((N, C), np.float32), "bfloat16": np.empty((N, C), np.uint16)}
PROBLEMS = {
    "missing": RuntimeError("cuBLASLt has no algorithm"), "broken": ValueError("a graph that cuDNN refuses"),
    "refused": UserError("no such layout"), "surprised": AssertionError(),
}  # fmt: skip
MILLISECONDS = {"slow": 3.0, "fast": 1.0}


def faster_of(epilogues="faster", attention="faster"):
    """(FasterOf, run(theirs, ours, ...)): a way is how long it takes, or one of PROBLEMS."""

    def time_ms(run):
        name = run()
        if name in PROBLEMS:
            raise PROBLEMS[name]
        return MILLISECONDS[name]

    chosen = FasterOf(time_ms, epilogues, attention)

    def run(theirs, ours, storage="bfloat16", work="gelu", **options):
        return chosen(work, OUT[storage], lambda: theirs, lambda: ours, **options)

    return chosen, run


def test_the_faster_is_taken_and_timed_once():
    chosen, run = faster_of()
    assert run("slow", "fast") == "fast"
    assert run("fast", "slow", work="attention") == "fast"
    assert run("fast", "slow") == "slow", "ours, as it was when it was timed"
    assert chosen.times_ms == {
        ("gelu", (N, C), "bfloat16"): (3.0, 1.0),
        ("attention", (N, C), "bfloat16"): (1.0, 3.0),
    }


@pytest.mark.parametrize("problem", PROBLEMS)
def test_what_the_library_cannot_do_is_ours(problem):
    """Whatever it says of it: training goes on."""
    chosen, run = faster_of()
    assert run(problem, "slow") == "slow"
    assert chosen.times_ms == {("gelu", (N, C), "bfloat16"): (math.inf, 3.0)}


def test_what_cannot_be_repeated_is_not_timed():
    chosen, run = faster_of()
    assert run("fast", "slow", work="bias gradient", repeatable=False) == "slow"
    assert not chosen.times_ms
    assert run("fast", "slow", work="bias gradient") == "fast"
    assert run("fast", "slow", work="bias gradient", repeatable=False) == "fast"


def test_ways_that_are_asked_for():
    for epilogues, attention, expected in (("always", "own", "slow"), ("never", "cudnn", "fast")):
        chosen, run = faster_of(epilogues, attention)
        assert run("slow", "fast") == expected
        assert run("fast", "slow", work="attention backward") == expected
        assert run("slow", "fast", storage="float32") == "fast", "GELU in float32 has its own kernel"
        assert run("slow", "fast", storage="float32", work="bias gradient") == expected
        assert not chosen.times_ms


def test_what_is_given_is_taken_and_not_timed():
    """Also in place of what was timed, and by who could not time it."""
    timed, run = faster_of()
    run("slow", "fast")
    run("fast", "slow", work="attention")
    given, run_given = faster_of()
    given.choices.update(timed.choices)
    assert run_given("slow", "fast") == "fast"
    assert run_given("fast", "slow") == "slow"
    assert run_given("fast", "slow", work="attention", repeatable=False) == "fast"
    assert given.times_ms == {}
    assert given.choices == timed.choices
    timed.choices["gelu", (N, C), "bfloat16"] = True
    assert run("slow", "fast") == "slow"


@pytest.fixture
def new_device(monkeypatch):
    """new_device(unsupported=..., ...): a Device on the fake CuPy, and a cuBLASLt without those epilogues."""

    def new(unsupported=(), **options):
        fake = FakeCublasLt([cublaslt.EPILOGUES[name] for name in unsupported])
        monkeypatch.setattr(cublaslt, "open_library", lambda name: fake)
        return device.Device(**options)

    fake_cupy.install(monkeypatch, Shim(lasting_build()))
    monkeypatch.setattr(device, "cached_code", lambda source, storage, arch, cache: f"{source} {storage}".encode())
    return new


def test_choices_go_to_another_device_of_the_same_maker(monkeypatch, new_device):
    """By way of JSON. The other one times nothing."""
    fake_cudnn.install(monkeypatch)
    first, second = new_device(), new_device()
    assert first.maker == {"device": "shim", "cublaslt": 130100, "cudnn": 92000}

    def compute(gpu):
        x, w, b = (fake_cupy.aligned(shape, np.uint16) for shape in ((N, C), (HIDDEN, C), (HIDDEN,)))
        for array, values in zip((x, w, b), random_arrays("bfloat16", x.shape, w.shape, b.shape), strict=True):
            array.set(values)
        out, saved = (gpu.empty((N, HIDDEN), x.dtype) for _ in range(2))
        bind(cupy_kernels, gpu).linear_gelu_forward(out, saved, x, w, b)
        return gpu.download(out).tobytes()

    expected, choices = compute(first), json.loads(json.dumps(first.choices()))
    assert choices["products"]
    assert choices["ways"] == [["gelu", [N, HIDDEN], "bfloat16", True]]
    second.give_choices(choices)
    monkeypatch.setattr(second, "time_ms", None)
    second.matmul._time_ms = second.faster_of._time_ms = None
    assert compute(second) == expected
    assert second.choices() == choices
    assert (first.timed(), second.timed()) == (len(choices["products"]) + 1, 0)


def random_arrays(storage, *shapes):
    random = np.random.default_rng(4)
    values = [random.standard_normal(shape).astype(np.float32) for shape in shapes]
    return [(to_bfloat16(each) if storage == "bfloat16" else each).view(ndarray) for each in values]


def assert_close(gpu, got, expected, storage, name):
    tolerance = (1e-5 if storage == "float32" else 0.02) * np.abs(expected).max()
    np.testing.assert_allclose(widen(gpu.download(got)), expected, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("epilogues", ["faster", "always", "never", "unsupported"])
@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
def test_layers_around_gelu(new_device, storage, epilogues):
    """On cuBLASLt's stand-in: NumPy's values and gradients, in each of two micro-steps."""
    if epilogues == "unsupported":
        gpu = new_device(("gelu_aux_bias", "dgelu", "bgradb"))
    else:
        gpu = new_device(epilogues=epilogues)
    inputs = random_arrays(storage, (N, C), (HIDDEN, C), (HIDDEN,), (C, HIDDEN), (N, C))
    shapes = {"gelu": (N, HIDDEN), "saved": (N, HIDDEN), "dgelu": (N, HIDDEN), "dweight": (C, HIDDEN)}
    shapes |= {"dinputs": (N, C), "dweight before": (HIDDEN, C), "dbias before": (HIDDEN,)}
    results = []
    for kernels, (x, w, b, w2, dy), new in (
        (bind(cupy_kernels, gpu), inputs, lambda shape: gpu.empty(shape, inputs[0].dtype)),
        (load_kernels("numpy", 1), [widen(np.asarray(each)) for each in inputs], np.zeros),
    ):
        out = {name: new(shape) for name, shape in shapes.items()}
        before = out["dinputs"], out["dweight before"], out["dbias before"]
        for accumulate in (False, True):
            kernels.linear_gelu_forward(out["gelu"], out["saved"], x, w, b)
            saved = out["gelu"], out["saved"]
            kernels.gelu_linear_backward(out["dgelu"], out["dweight"], dy, *saved, w2, accumulate)
            kernels.linear_backward(*before, out["dgelu"], x, w, accumulate)
        results.append(out)
    for name in shapes.keys() - {"saved"}:
        assert_close(gpu, results[0][name], results[1][name], storage, name)


@pytest.mark.parametrize("way", ["cudnn", "faster", "own", "unsupported", "missing"])
def test_attention(monkeypatch, new_device, way):
    """cuDNN's stand-in gets the packed arrays' strides; by any way forward and backward are NumPy's."""
    if way != "missing":
        fake_cudnn.install(monkeypatch, is_supported=way != "unsupported")
    gpu = new_device(attention=way if way in ("cudnn", "own") else "faster")
    qkv, dout = random_arrays("bfloat16", (B, T, 3 * WIDTH), (B, T, WIDTH))
    results = []
    for kernels, (packed, gradient), new in (
        (bind(cupy_kernels, gpu), (qkv, dout), gpu.empty),
        (load_kernels("numpy", 1), (widen(np.asarray(qkv)), widen(np.asarray(dout))), np.zeros),
    ):
        out, dqkv = new(dout.shape, packed.dtype), new(qkv.shape, packed.dtype)
        logsumexp = new((B, HEADS, T), np.float32)
        kernels.attention_forward(out, logsumexp, packed, HEADS)
        kernels.attention_backward(dqkv, gradient, packed, out, logsumexp, HEADS)
        results.append({"out": out, "logsumexp": logsumexp, "dqkv": dqkv})
    for name, expected in results[1].items():
        assert_close(gpu, results[0][name], expected, "bfloat16", name)
    cudnn_ran = gpu.cudnn_attention is not None and len(gpu.cudnn_attention._graphs) == 2
    assert cudnn_ran == (way in ("cudnn", "faster"))
    theirs_ms = [theirs_ms for theirs_ms, _ in gpu.faster_of.times_ms.values()]
    assert theirs_ms == {"faster": [1 / 3, 1 / 3], "unsupported": [math.inf, math.inf]}.get(way, [])


def test_a_cudnn_that_does_not_start_is_none(monkeypatch, new_device):
    """Whatever its Python layer raises: attention is ours, and training goes on."""
    fake_cudnn.install(monkeypatch)

    def refuse(handle, stream):
        raise AssertionError("of another context")

    monkeypatch.setattr(sys.modules["cudnn"], "set_stream", refuse)
    assert new_device().maker["cudnn"] is None
    with pytest.raises(UserError, match=r"no cuDNN \(of another context\)"):
        new_device(attention="cudnn")


def test_an_epilogue_that_is_missing_fails_no_test_of_a_gpu(new_device):
    """It is what training would take its own kernel for: said, as a skip."""
    gpu = new_device(("dgelu",))
    x, w, saved = (fake_cupy.aligned(shape, np.uint16) for shape in ((N, C), (C, HIDDEN), (N, HIDDEN)))
    with pytest.raises(pytest.skip.Exception, match="unsupported: cuBLASLt has no algorithm"), unsupported_is_said():
        gpu.matmul(gpu.empty(saved.shape, saved.dtype), x, w, dgelu_input=saved)
