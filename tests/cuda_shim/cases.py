"""What each kernel is to give, by the NumPy kernels in float64 on the very values that the CUDA kernel reads.

A case runs its kernels on a device and returns [(name, what came out, what is expected)].
"""

import numpy as np
from cuda_shim.memory import widen

from gpt2 import numpy_kernels
from gpt2.cupy_kernels import launch
from gpt2.numpy_kernels.cores import Cores


def embedding_case(device, memory, cores: Cores, B, T, C, accumulate):
    """V small, so that tokens repeat; one token often enough that every thread row of a block has some of it."""
    V, context = 11, T + 2
    tokens = memory.random.integers(V, size=(B, T)).astype(np.int32)
    tokens[:, ::2] = 3
    wte, wpe, dout, out = memory.normal(V, C), memory.normal(context, C), memory.normal(B, T, C), memory.nans(B, T, C)
    launch.embedding_forward(device, out, memory.put_exactly(tokens), wte, wpe)
    expected_out = np.empty((B, T, C))
    numpy_kernels.embedding_forward(cores, expected_out, tokens, widen(wte), widen(wpe))
    dwte, dwpe = memory.normal(V, C), memory.normal(context, C) if accumulate else memory.nans(context, C)
    expected_dwte, expected_dwpe = widen(dwte), widen(dwpe)
    numpy_kernels.embedding_backward(cores, expected_dwte, expected_dwpe, widen(dout), tokens, accumulate)
    order, sorted_tokens = (memory.put_exactly(array) for array in launch.sort_tokens(tokens))
    launch.embedding_backward(device, dwte, dwpe, dout, order, sorted_tokens, accumulate)
    return [("out", out, expected_out), ("dwte", dwte, expected_dwte), ("dwpe", dwpe, expected_dwpe)]


def layernorm_forward_case(device, memory, cores: Cores, N, C, with_residual):
    """What is normalized is the residual as stored, rounded."""
    inputs, branch, weight, bias = (memory.normal(*shape) for shape in ((N, C), (N, C), (C,), (C,)))
    residual, out, mean, rstd = (
        memory.nans(N, C), memory.nans(N, C), memory.nans(N, dtype=np.float32), memory.nans(N, dtype=np.float32),
    )  # fmt: skip
    results = []
    if with_residual:
        launch.residual_layernorm_forward(device, residual, out, mean, rstd, inputs, branch, weight, bias)
        results.append(("residual", residual, widen(inputs) + widen(branch)))
    else:
        residual = inputs
        launch.layernorm_forward(device, out, mean, rstd, inputs, weight, bias)
    expected = np.empty((N, C)), np.empty(N), np.empty(N)
    numpy_kernels.layernorm_forward(cores, *expected, widen(residual), widen(weight), widen(bias))
    return results + list(zip(("out", "mean", "rstd"), (out, mean, rstd), expected, strict=True))


def layernorm_backward_case(device, memory, cores: Cores, N, C, accumulate):
    """dinputs holds something before; so do dweight and dbias, if accumulate."""
    inputs, doutputs, weight, dinputs = (memory.normal(*shape) for shape in ((N, C), (N, C), (C,), (N, C)))
    mean = memory.put_exactly(widen(inputs).mean(1).astype(np.float32))
    rstd = memory.put_exactly((1 / np.sqrt(widen(inputs).var(1) + 1e-5)).astype(np.float32))
    dweight, dbias = (memory.normal(C) if accumulate else memory.nans(C) for _ in range(2))
    got = dinputs, dweight, dbias
    expected = tuple(widen(array) for array in got)
    arguments = doutputs, inputs, mean, rstd, weight
    numpy_kernels.layernorm_backward(cores, *expected, *map(widen, arguments), accumulate)
    launch.layernorm_backward(device, *got, *arguments, accumulate)
    return list(zip(("dinputs", "dweight", "dbias"), got, expected, strict=True))


def gelu_case(device, memory, cores: Cores, N, width):
    """With values far out on both sides, where the exponential overflows."""
    product, bias, doutputs = memory.normal(N, width), memory.normal(width), memory.normal(N, width)
    product[0, : min(width, 5)] = memory.put([-1e4, -90.0, 20.0, 90.0, 1e4][:width])
    saved, out, dinputs = memory.put(widen(product)), memory.nans(N, width), memory.put(widen(doutputs))
    launch.bias_gelu_forward(device, out, saved, bias)
    launch.gelu_backward(device, dinputs, saved)
    expected_out, slope = np.empty((N, width)), np.empty((N, width))
    numpy_kernels.linear_gelu_forward(cores, expected_out, slope, widen(saved), np.eye(width), np.zeros(width))
    expected_saved = widen(product) + widen(bias)
    return [("saved", saved, expected_saved), ("out", out, expected_out), ("d", dinputs, widen(doutputs) * slope)]


def classifier_case(device, memory, cores: Cores, N, V, padded, spread):
    """The pad columns hold the largest logits and NaNs before. spread: the logits' standard deviation."""
    values = spread * memory.random.standard_normal((N, padded))
    values[:, V:], values[:, V + 1 :] = 1e3, np.nan
    logits, scale = memory.put(values), 0.25
    targets = memory.put_exactly(memory.random.integers(V, size=N).astype(np.int32))
    targets[-1] = V - 1
    losses, losses_alone = (memory.nans(N, dtype=np.float32) for _ in range(2))
    expected_losses, exponentials, row_scale = np.empty(N), np.empty((N, padded)), np.empty(N)
    numpy_kernels.classifier_forward(
        cores, expected_losses, exponentials, row_scale, widen(logits)[:, :V], np.eye(padded, V), targets, V, scale
    )
    launch.cross_entropy(device, losses_alone, logits, targets, V, scale, False)
    launch.cross_entropy(device, losses, logits, targets, V, scale, True)
    dlogits = exponentials * row_scale[:, None]
    return [("losses", losses, expected_losses), ("alone", losses_alone, expected_losses), ("d", logits, dlogits)]


def adamw_case(device, memory, cores: Cores, count, offset):
    """Three steps on a range that starts `offset` elements past a multiple of 16 bytes. In float32 without a master."""
    parameters = memory.put(memory.random.standard_normal(count), offset)
    full = memory.storage == "float32"
    master = parameters if full else memory.put_exactly(widen(parameters).astype(np.float32), offset)
    m, v = (memory.put_exactly(np.zeros(count, np.float32), offset) for _ in range(2))
    ranges = [(0, count // 7), (count // 7 + 1, count // 5), (count // 3, count)]
    decaying = memory.put_exactly(np.array(ranges, np.int64))
    expected, expected_m, expected_v = widen(master), np.zeros(count), np.zeros(count)
    for step in range(1, 4):
        gradients = memory.put(memory.random.standard_normal(count), offset)
        settings = (step, 1e-2, 0.9, 0.95, 1e-8, 0.1, 0.3)
        constants = memory.put_exactly(launch.adamw_constants(*settings))
        launch.adamw(device, parameters, master, gradients, m, v, decaying, constants)
        numpy_kernels.adamw(cores, expected, widen(gradients), expected_m, expected_v, ranges, *settings)
    results = [("parameters", parameters, expected), ("m", m, expected_m), ("v", v, expected_v)]
    return [*results, ("master", master, expected)]


def sum_of_squares_case(device, memory, cores: Cores, count, offset):
    """A flat range that starts `offset` elements past a multiple of 16 bytes."""
    flat, total = memory.put(memory.random.standard_normal(count), offset), memory.nans(1, dtype=np.float64)
    launch.sum_of_squares(device, total, flat)
    return [("total", total, np.array([numpy_kernels.sum_of_squares(cores, widen(flat))]))]
