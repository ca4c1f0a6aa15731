"""The items of gpu_check.py on the two things that most of a step's time is for: matrix products and attention.

Each is compared before it is timed: fast and wrong is a failure. Times are the GPU's, between events on the stream.
"""

import numpy as np

from gpt2.errors import UserError
from gpt2.kernels import numpy as numpy_kernels
from gpt2.kernels.cupy import Device, attention, launch
from gpt2.kernels.cupy.matmul import make_recipe
from gpt2.kernels.numpy import Cores
from scripts.machine.gpu import on_host, random_on_gpu
from scripts.step_bench.gpu_kernels import attention_flops, matmul_work

CHECKED_ROWS = 32
TOLERANCE = 2e-2  # of the largest value, in bfloat16


def products(sizes):
    """Each product of a layer and the head: algorithms timed, checked, and each epilogue against its own kernel."""
    device, lines, report = Device(), [], []
    C, Vp, N = sizes.model.n_embd, sizes.model.padded_vocab_size, sizes.batch_size * sizes.sequence_length
    passed = True
    for name, inputs, outputs in (("qkv", C, 3 * C), ("attproj", C, C), ("fc", C, 4 * C), ("fcproj", 4 * C, C),
                                  ("head", C, Vp)):  # fmt: skip
        x, w, y = (
            random_on_gpu(device, N, inputs),
            random_on_gpu(device, outputs, inputs),
            random_on_gpu(device, N, outputs),
        )
        dw, dx = device.empty(w.shape, w.dtype), device.empty(x.shape, x.dtype)
        bias = random_on_gpu(device, outputs)
        for form, out, left, right, options in (
            ("forward", y, x, w.T, {} if name == "head" else {"bias": bias}),
            ("dinputs", dx, y, w, {}),
            ("dweight", dw, y.T, x, {}),
            ("dweight +=", dw, y.T, x, {"accumulate": True}),
        ):
            entry = _product(device, f"{name} {form}", out, left, right, options)
            passed = passed and entry["error"] < TOLERANCE
            report.append(entry)
    for name, outcome in _epilogues(device, N, C).items():
        passed = passed and outcome.get("difference", 0.0) < TOLERANCE
        report.append({"name": name} | outcome)
    for entry in report:
        lines.append("  ".join(f"{key} {_short(value)}" for key, value in entry.items()))
    return {"lines": lines, "products": report, "passed": passed}


def _short(value):
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _product(device, name, out, left, right, options):
    """Time and check one product. Checked are some rows, against NumPy in float64."""
    before = on_host(device, out[:CHECKED_ROWS]) if options.get("accumulate") else 0.0
    device.matmul(out, left, right, **options)
    expected = on_host(device, left[:CHECKED_ROWS]) @ on_host(device, right) + before
    if "bias" in options:
        expected += on_host(device, options["bias"])
    error = np.abs(on_host(device, out[:CHECKED_ROWS]) - expected).max() / np.abs(expected).max()
    plan = device.matmul.plans[make_recipe(out, left, right, "bias" if "bias" in options else "none")]
    ms = device.time_ms(lambda: device.matmul(out, left, right, **options))
    _, _, flops = matmul_work(out, left, right, options)
    candidates = [round(t, 4) for t in plan.times_ms]
    return {"name": name, "ms": ms, "TFLOP/s": flops / ms / 1e9, "error": float(error), "candidates_ms": candidates}


def _epilogues(device, N, C):
    """Fused against apart: milliseconds, and the largest difference over the largest value."""
    x, w, bias = random_on_gpu(device, N, C), random_on_gpu(device, 4 * C, C), random_on_gpu(device, 4 * C)
    w2 = random_on_gpu(device, C, 4 * C)
    out, saved, out2, saved2 = (device.empty((N, 4 * C), x.dtype) for _ in range(4))
    sums, sums2 = (device.empty((C,), x.dtype) for _ in range(2))
    dw, dw2 = (device.empty((C, 4 * C), x.dtype) for _ in range(2))

    def gelu_apart():
        device.matmul(saved2, x, w.T)
        launch.bias_gelu_forward(device, out2, saved2, bias)

    def dgelu_apart():
        device.matmul(out2, x, w2)
        launch.gelu_backward(device, out2, saved)

    def bgrad_apart():
        device.matmul(dw2, x.T, out)
        launch.column_sums(device, sums2, x, False)

    trials = {
        "gelu_aux_bias": (lambda: device.matmul(out, x, w.T, bias=bias, gelu_input=saved), gelu_apart, out, out2),
        "dgelu": (lambda: device.matmul(out, x, w2, dgelu_input=saved), dgelu_apart, out, out2),
        "bgradb": (lambda: device.matmul(dw, x.T, out, left_sums=sums), bgrad_apart, sums, sums2),
    }
    return {name: _fused_against_apart(device, *trial) for name, trial in trials.items()}


def _fused_against_apart(device, fused, apart, got, expected):
    try:
        result = {"fused_ms": device.time_ms(fused)}
    except RuntimeError as error:  # an epilogue that cuBLASLt does not have: the apart one is there
        return {"fused": str(error).splitlines()[0], "apart_ms": device.time_ms(apart)}
    result["apart_ms"] = device.time_ms(apart)
    fused()
    apart()
    difference = (
        np.abs(on_host(device, got) - on_host(device, expected)).max() / np.abs(on_host(device, expected)).max()
    )
    return result | {"difference": float(difference)}


def own_attention(sizes):
    return _attention(Device(attention="own"), sizes)


def cudnn_attention(sizes):
    """Only where nvidia-cudnn-frontend is installed: otherwise the line that says so."""
    try:
        device = Device(attention="cudnn")
    except UserError as missing:
        return {"lines": [f"not tried: {missing}"]}
    return _attention(device, sizes)


def _attention(device, sizes):
    """Forward and backward: the first sequence against NumPy, and TFLOP/s (the causal half counted)."""
    B, T, C, H = sizes.batch_size, sizes.sequence_length, sizes.model.n_embd, sizes.model.n_head
    qkv, dout = random_on_gpu(device, B, T, 3 * C), random_on_gpu(device, B, T, C)
    out, dqkv = device.empty(dout.shape, dout.dtype), device.empty(qkv.shape, qkv.dtype)
    logsumexp = device.empty((B, H, T), np.float32)

    def forward():
        attention.attention_forward(device, out, logsumexp, qkv, H)

    def backward():
        attention.attention_backward(device, dqkv, dout, qkv, out, logsumexp, H)

    forward()
    backward()
    one = [on_host(device, array[:1]) for array in (qkv, dout, out, dqkv)]
    expected, sums, gradient = np.empty(one[1].shape), np.empty((1, H, T)), np.empty(one[0].shape)
    numpy_kernels.attention_forward(Cores(8), expected, sums, one[0], H)
    numpy_kernels.attention_backward(Cores(8), gradient, one[1], one[0], expected, sums, H)
    errors = [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in ((one[2], expected), (one[3], gradient))]
    first = on_host(device, dqkv)
    backward()
    same = bool((on_host(device, dqkv) == first).all())
    forward_ms, backward_ms = device.time_ms(forward), device.time_ms(backward)
    speeds = [attention_flops(2, qkv.shape) / forward_ms / 1e9, attention_flops(5, qkv.shape) / backward_ms / 1e9]
    lines = [
        f"forward  {forward_ms:.3f} ms, {speeds[0]:.0f} TFLOP/s, relative error {errors[0]:.2g}",
        f"backward {backward_ms:.3f} ms, {speeds[1]:.0f} TFLOP/s, relative error {errors[1]:.2g}",
        f"the same bits the second time: {same}",
    ]
    return {
        "lines": lines,
        "ms": [forward_ms, backward_ms],
        "errors": errors,
        "passed": max(errors) < TOLERANCE and same,
    }


ITEMS = {"products": products, "attention": own_attention, "cudnn": cudnn_attention}
