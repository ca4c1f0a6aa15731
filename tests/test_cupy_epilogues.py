"""Work in a product's epilogue or apart: the faster one by the clock, and the same gradients either way."""

import math

import numpy as np
import pytest
from cuda_shim import fake_cupy
from cuda_shim.fake_cublaslt import FakeCublasLt
from cuda_shim.fake_cupy import ndarray
from cuda_shim.memory import to_bfloat16, widen
from cuda_shim.shim import Shim, lasting_build

from gpt2 import cupy_kernels
from gpt2.cupy_kernels import cublaslt, device
from gpt2.cupy_kernels.epilogues import Epilogues
from gpt2.kernels import bind, load_kernels

N, C, HIDDEN = 24, 16, 40
OUT = {"float32": np.empty((N, C), np.float32), "bfloat16": np.empty((N, C), np.uint16)}
MILLISECONDS = {"slow": 3.0, "fast": 1.0}


def faster_of(way="faster"):
    """(Epilogues, what was run): `missing` is what cuBLASLt does not have."""
    runs = []

    def time_ms(run):
        name = run()
        if name == "missing":
            raise RuntimeError("cuBLASLt has no algorithm")
        return MILLISECONDS[name]

    chosen = Epilogues(time_ms, way)

    def run(fused, apart, storage="bfloat16", work="gelu", **options):
        runs.append(chosen(work, OUT[storage], lambda: fused, lambda: apart, **options))
        return runs[-1]

    return chosen, run


def test_the_faster_is_taken_and_timed_once():
    chosen, run = faster_of()
    assert run("slow", "fast") == "fast"
    assert run("fast", "slow", work="dgelu") == "fast"
    assert run("fast", "slow") == "slow", "apart, as it was when it was timed"
    assert chosen.times_ms == {
        ("gelu", (N, C), "bfloat16"): (3.0, 1.0),
        ("dgelu", (N, C), "bfloat16"): (1.0, 3.0),
    }


def test_what_cublaslt_does_not_have_is_done_apart():
    chosen, run = faster_of()
    assert run("missing", "slow") == "slow"
    assert chosen.times_ms == {("gelu", (N, C), "bfloat16"): (math.inf, 3.0)}


def test_what_cannot_be_repeated_is_not_timed():
    chosen, run = faster_of()
    assert run("fast", "slow", work="bias gradient", repeatable=False) == "slow"
    assert not chosen.times_ms
    assert run("fast", "slow", work="bias gradient") == "fast"
    assert run("fast", "slow", work="bias gradient", repeatable=False) == "fast"


def test_ways_that_are_asked_for():
    for way, expected in (("always", "slow"), ("never", "fast")):
        chosen, run = faster_of(way)
        assert run("slow", "fast") == expected
        assert not chosen.times_ms
        assert run("slow", "fast", storage="float32") == "fast", "GELU in float32 has its own kernel"
        assert run("slow", "fast", storage="float32", work="bias gradient") == expected


@pytest.mark.parametrize("epilogues", ["faster", "always", "never", "unsupported"])
@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
def test_two_layers_on_the_device(monkeypatch, storage, epilogues):
    """The layers around GELU on cuBLASLt's stand-in: NumPy's values and gradients, in each of two micro-steps."""
    unsupported = [cublaslt.EPILOGUES[name] for name in ("gelu_aux_bias", "dgelu", "bgradb")]
    library = FakeCublasLt(unsupported if epilogues == "unsupported" else ())
    fake_cupy.install(monkeypatch, Shim(lasting_build()))
    monkeypatch.setattr(cublaslt, "open_library", lambda name: library)
    monkeypatch.setattr(device, "cached_code", lambda source, storage, arch, cache: f"{source} {storage}".encode())
    gpu = device.Device(epilogues="faster" if epilogues == "unsupported" else epilogues)
    random, dtype = np.random.default_rng(4), {"float32": np.float32, "bfloat16": np.uint16}[storage]

    def put(*shape):
        values = random.standard_normal(shape).astype(np.float32)
        return (to_bfloat16(values) if storage == "bfloat16" else values).view(ndarray)

    inputs = x, w, b, w2, dy = put(N, C), put(HIDDEN, C), put(HIDDEN), put(C, HIDDEN), put(N, C)
    shapes = {"gelu": (N, HIDDEN), "saved": (N, HIDDEN), "dgelu": (N, HIDDEN), "dw": (C, HIDDEN), "db": (C,)}
    results = []
    for kernels, (x, w, b, w2, dy), new in (
        (bind(cupy_kernels, gpu), inputs, lambda shape: gpu.empty(shape, dtype)),
        (load_kernels("numpy", 1), [widen(np.asarray(each)) for each in inputs], np.zeros),
    ):
        out = {name: new(shape) for name, shape in shapes.items()}
        for accumulate in (False, True):
            kernels.linear_gelu_forward(out["gelu"], out["saved"], x, w, b)
            kernels.gelu_linear_backward(
                out["dgelu"], out["dw"], out["db"], dy, out["gelu"], out["saved"], w2, accumulate
            )
        results.append(out)
    ours, expected = results
    for name in ("gelu", "dgelu", "dw", "db"):
        scale = np.abs(expected[name]).max()
        tolerance = (1e-5 if storage == "float32" else 0.02) * scale
        np.testing.assert_allclose(widen(gpu.download(ours[name])), expected[name], atol=tolerance, err_msg=name)
