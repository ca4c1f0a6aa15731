"""The items of gpu_check.py about the machine and the whole step: copies, launches, tokens per second."""

import time
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
from cuda_shim.memory import to_bfloat16
from gpu_check_numbers import dtype_of
from gpu_check_products import on_gpu

from gpt2 import cupy_kernels
from gpt2.cupy_kernels import Device, launch
from gpt2.errors import UserError
from gpt2.kernels import bind
from gpt2.model import new_model
from gpt2.optimizer import AdamW, AdamWSettings
from gpt2.parameters import Layout, Parameters, initialize

PEAK_FLOPS = 990e12  # dense bfloat16 of H100 and H200, NVIDIA's datasheet: what MFU is a fraction of


def copies(sizes):
    """GB/s between pinned host memory and the GPU, each way, and within the GPU."""
    device = Device()
    size, pinned = sizes.copy_bytes, device.pinned(sizes.copy_bytes // 4)
    one, two = device.empty((size,), np.uint8), device.empty((size,), np.uint8)
    runs = {
        "host to GPU": lambda: one.data.copy_from_host_async(pinned.ctypes.data, size, device.stream),
        "GPU to host": lambda: one.data.copy_to_host_async(pinned.ctypes.data, size, device.stream),
        "GPU to GPU, read and written": lambda: two.data.copy_from_device_async(one.data, size, device.stream),
    }
    rates = {name: size * (2 if "written" in name else 1) / device.time_ms(run) / 1e6 for name, run in runs.items()}
    return {"lines": [f"{name:30} {rate:8.1f} GB/s" for name, rate in rates.items()], "rates": rates}


def launches(sizes):
    """The host's microseconds for a launch, and for a product whose plan is there."""
    device, count = Device(), 1000
    small, square = on_gpu(device, 64), on_gpu(device, 64, 64)
    out = device.empty(square.shape, square.dtype)
    calls = {
        "kernel": lambda: launch.gelu_backward(device, small, small),
        "product": lambda: device.matmul(out, square, square),
    }
    microseconds = {name: _host_microseconds(device, call, count) for name, call in calls.items()}
    return {"lines": [f"{name:10} {value:.1f} us" for name, value in microseconds.items()], "us": microseconds}


def _host_microseconds(device, call, count):
    call()
    device.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    seconds = time.perf_counter() - start
    device.synchronize()
    return seconds / count * 1e6


def step(sizes):
    """Tokens per second of the whole step at each batch size, and where the largest one's time goes."""
    lines, report, device, parameters = [], [], Device(), _parameters(sizes.model)
    for B in sizes.batch_sizes:
        try:
            report.append(_timed_step(device, sizes, B, parameters, by_kernel=sizes.batch_sizes[-1] == B))
        except UserError as error:
            lines.append(f"B={B}: {error}")
            continue
        lines += _step_lines(report[-1])
    return {"lines": lines, "steps": report, "passed": bool(report)}


def step_variants(sizes):
    """The largest batch again, with GELU apart, and with cuDNN's attention where it is installed."""
    lines, report, parameters = [], [], _parameters(sizes.model)
    for name, options in (("GELU apart", {"fused_gelu": False}), ("cuDNN attention", {"cudnn": True})):
        try:
            report.append(_timed_step(Device(**options), sizes, sizes.batch_sizes[-1], parameters, by_kernel=False))
        except UserError as error:
            lines.append(f"{name}: {error}")
            continue
        lines += [f"{name}: {line}" for line in _step_lines(report[-1])]
    return {"lines": lines, "steps": report}


def _step_lines(result):
    first = "B={batch_size}: {ms:.2f} ms, {tokens_per_s:,.0f} tokens/s, MFU {mfu:.1%} of 990 TFLOP/s, loss {loss:.3f}"
    table = [f"    {name:28} {ms:9.3f} ms  {ms / result['ms']:6.1%}" for name, ms in result.get("kernels", {}).items()]
    return [first.format(**result), *table]


def _timed_step(device, sizes, B, parameters, by_kernel):
    """Forward, backward, AdamW in bfloat16: the mean of some steps, then one more with each kernel between events."""
    config, T, events = sizes.model, sizes.sequence_length, defaultdict(list)
    kernels = bind(cupy_kernels, device)
    timed = SimpleNamespace(**{name: _between_events(device, events, name, k) for name, k in vars(kernels).items()})
    model = new_model(config, kernels, B, T, dtype_of("bfloat16"))
    model.parameters.flat[:] = device.cupy.asarray(parameters).view(dtype_of("bfloat16"))
    optimizer = AdamW(kernels, model.parameters.layout, 0, model.parameters.layout.size, AdamWSettings())
    tokens = np.random.default_rng(1).integers(config.vocab_size, size=(B, T + 1), dtype=np.int32)

    def one_step():
        loss = model.forward(tokens[:, :-1], tokens[:, 1:], 1.0 / (B * T))
        model.backward(accumulate=False)
        norm = model.kernels.sum_of_squares(model.gradients.flat) ** 0.5
        optimizer.update(model.parameters.flat, model.gradients.flat, 3e-4, min(1.0, 1.0 / norm))
        return loss / (B * T)

    for _ in range(2):
        loss = one_step()
    device.synchronize()
    start = time.perf_counter()
    for _ in range(sizes.steps):
        loss = one_step()
    device.synchronize()
    seconds = (time.perf_counter() - start) / sizes.steps
    flops = 6 * model.parameters.layout.count + 6 * config.n_layer * config.n_embd * T  # a token: llm.c's count
    result = {"batch_size": B, "ms": seconds * 1e3, "tokens_per_s": B * T / seconds, "loss": loss}
    result["mfu"] = B * T * flops / seconds / PEAK_FLOPS
    if by_kernel:
        model.kernels = optimizer.kernels = timed
        one_step()
        device.synchronize()
        spent = {name: sum(device.elapsed_ms(*pair) for pair in pairs) for name, pairs in events.items()}
        result["kernels"] = dict(sorted(spent.items(), key=lambda item: -item[1]))
    return result


def _parameters(config):
    """GPT-2's initialization in bfloat16, on the host."""
    host = Parameters.zeros(Layout(config))
    initialize(host, seed=1)
    return to_bfloat16(host.flat)


def _between_events(device, events, name, kernel):
    def call(*arguments):
        start, stop = device.new_event(), device.new_event()
        start.record(device.stream)
        result = kernel(*arguments)
        stop.record(device.stream)
        events[name].append((start, stop))
        return result

    return call


ITEMS = {"copies": copies, "launches": launches, "step": step, "step-variants": step_variants}
