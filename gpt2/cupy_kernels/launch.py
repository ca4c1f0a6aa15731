"""The kernels' launches: arrays to kernel arguments, grids and blocks; the same for a GPU and for the CPU shim.

`device` is whatever runs kernels: device.launch(source, storage, kernel, grid, block, arguments, shared_bytes) for a
kernel of compile.py's SOURCES, with arrays, NumPy scalars and None (null) as arguments; device.scratch(name, shape,
dtype) is an uninitialized array. Arrays are C-contiguous, of float32 or two-byte bfloat16 alike in one call where
nothing else is said, tokens and targets of int32; all but those of adamw and sum_of_squares start at multiples of 16
bytes. Shapes as in gpt2/kernels.py.
"""

import math

import numpy as np

from gpt2.errors import UserError

WARP = 32
THREADS = 256
CLASSIFIER_THREADS = 512
ACCESS_BYTES = 16
# Blocks of the first of two phases, whatever the GPU: the order of additions must not depend on it.
PARTIAL_BLOCKS = 512
# Of dynamic shared memory that a block gets without asking the driver for more.
SHARED_BYTES = 48 << 10


def embedding_forward(device, out, tokens, wte, wpe):
    """out[b, t] = wte[tokens[b, t]] + wpe[t].  out (B, T, C), tokens (B, T), wte (Vp, C), wpe (context, C)."""
    B, T, C = out.shape
    arguments = (out, tokens, wte, wpe, *_int32(B * T, T, C))
    device.launch("embedding", storage(out), "embedding_forward", _grid(out), (THREADS,), arguments)


def sort_tokens(tokens):
    """(order, sorted_tokens), both (N,) int32, of host tokens (B, T): for embedding_backward, which sums by token.

    On the host, beside the loading of the batch: the tokens are there before the step that needs them.
    """
    order = np.argsort(tokens, axis=None, kind="stable")
    return order.astype(np.int32), tokens.reshape(-1)[order].astype(np.int32)


def embedding_backward(device, dwte, dwpe, dout, order, sorted_tokens, accumulate):
    """dwte[token] += the sum of dout (B, T, C) where it stood; dwpe[t] = or += the sum over b.

    dwte is always added to: it is tied to the head, whose gradient is written first. order, sorted_tokens: sort_tokens.
    """
    B, T, C = dout.shape
    chunks = math.ceil(C * dout.itemsize / (WARP * ACCESS_BYTES))
    arguments = (dwte, dout, order, sorted_tokens, *_int32(B * T, C))
    grid, block = (B * T, chunks), (WARP, THREADS // WARP)
    device.launch("embedding", storage(dout), "embedding_backward_tokens", grid, block, arguments)
    arguments = (dwpe, dout, *_int32(B, T, len(dwpe), C, accumulate))
    device.launch("embedding", storage(dout), "embedding_backward_positions", _grid(dwpe), (THREADS,), arguments)


def layernorm_forward(device, out, mean, rstd, inputs, weight, bias):
    """out, inputs (N, C); mean, rstd (N,) float32, kept for backward; weight, bias (C,)."""
    residual_layernorm_forward(device, None, out, mean, rstd, inputs, None, weight, bias)


def residual_layernorm_forward(device, residual, out, mean, rstd, inputs, branch, weight, bias):
    """residual = inputs + branch, out = LayerNorm(residual). All (N, C) but mean, rstd (N,) float32, weight, bias (C,).

    With None for residual and branch: LayerNorm(inputs).
    """
    N, C = inputs.shape
    warps, shared_bytes = _warps(C * inputs.itemsize)
    arguments = (residual, out, mean, rstd, inputs, branch, weight, bias, *_int32(N, C))
    grid, block = (math.ceil(N / warps),), (warps * WARP,)
    device.launch("layernorm", storage(out), "residual_layernorm_forward", grid, block, arguments, shared_bytes)


def layernorm_backward(device, dinputs, dweight, dbias, doutputs, inputs, mean, rstd, weight, accumulate):
    """dinputs (N, C) += gradient (the residual stream's is already there); dweight, dbias (C,) = or +=."""
    N, C = inputs.shape
    warps, shared_bytes = _warps(2 * C * np.dtype(np.float32).itemsize)
    blocks = min(math.ceil(N / warps), PARTIAL_BLOCKS)
    partial_sums = device.scratch("partial_sums", (blocks, 2, C), np.float32)
    arguments = (dinputs, partial_sums, doutputs, inputs, mean, rstd, weight, *_int32(N, C))
    block = (warps * WARP,)
    device.launch("layernorm", storage(dinputs), "layernorm_backward", (blocks,), block, arguments, shared_bytes)
    arguments = (dweight, dbias, partial_sums, *_int32(blocks, C, accumulate))
    grid, block = (math.ceil(2 * C / WARP),), (WARP, THREADS // WARP)
    device.launch("layernorm", storage(dweight), "layernorm_backward_parameters", grid, block, arguments)


def bias_gelu_forward(device, out, saved, bias):
    """saved (N, width) += bias (width,), out (N, width) = gelu(saved): the rest of a linear_gelu_forward."""
    arguments = (out, saved, bias, np.int64(saved.size), np.int32(len(bias)))
    device.launch("gelu", storage(out), "bias_gelu_forward", _grid(out), (THREADS,), arguments)


def gelu_backward(device, dinputs, saved):
    """dinputs (N, width) holds the gradient of GELU's output before, of its input after."""
    arguments = (dinputs, saved, np.int64(saved.size))
    device.launch("gelu", storage(dinputs), "gelu_backward", _grid(dinputs), (THREADS,), arguments)


def cross_entropy(device, losses, logits, targets, vocab_size, scale, with_gradient):
    """losses (N,) float32 of logits (N, Vp) against targets (N,); with_gradient: logits become dlogits * scale.

    The pad columns [V, Vp) take no part, and get gradient 0.
    """
    N, padded = logits.shape
    arguments = (losses, logits, targets, *_int32(vocab_size, padded), np.float32(scale), np.int32(with_gradient))
    device.launch("classifier", storage(logits), "cross_entropy", (N,), (CLASSIFIER_THREADS,), arguments)


def adamw_constants(step, lr, beta1, beta2, eps, weight_decay, gradient_scale):
    """What adamw needs to know of a step (counted from 1), (6,) float32: derived in numpy_kernels/adamw.py."""
    root = math.sqrt((1.0 - beta2) / (1.0 - beta2**step))
    step_size = lr * (1.0 - beta1) / (1.0 - beta1**step) / root
    return np.array([beta1, beta2, step_size, eps / root, 1.0 - lr * weight_decay, gradient_scale], np.float32)


def adamw(device, parameters, master, gradients, m, v, decaying, constants):
    """One step, in place, on flat arrays of one length: parameters, gradients; master, m, v float32.

    master: the parameters in float32; in float32 the parameters themselves. decaying (ranges, 2) int64: the ranges that
    weight decay is for, in order; constants: adamw_constants on the device.
    """
    arguments = (parameters, master, m, v, gradients, decaying, np.int32(len(decaying)), constants)
    arguments += (np.int64(len(parameters)),)
    device.launch("adamw", storage(parameters), "adamw", _grid(master), (THREADS,), arguments)


def sum_of_squares(device, total, flat):
    """total (1,) float64 = sum of squares of a flat range; stays on the device, where clipping can use it."""
    blocks = min(_grid(flat)[0], PARTIAL_BLOCKS)
    partial_sums = device.scratch("partial_sums", (blocks,), np.float32)
    arguments = (partial_sums, flat, np.int64(len(flat)))
    device.launch("sum_of_squares", storage(flat), "sum_of_squares", (blocks,), (THREADS,), arguments)
    arguments = (total, partial_sums, np.int32(blocks))
    device.launch("sum_of_squares", storage(flat), "sum_of_partials", (1,), (THREADS,), arguments)


def storage(array) -> str:
    """Which of compile.py's STORAGES holds this array's values."""
    return {4: "float32", 2: "bfloat16"}[array.itemsize]


def _int32(*numbers):
    return tuple(np.int32(number) for number in numbers)


def _grid(array):
    """Blocks of THREADS threads, a thread for each 16 bytes of the array; the kernels loop where that is too few."""
    return (math.ceil(array.size * array.itemsize / (ACCESS_BYTES * THREADS)),)


def _warps(row_bytes: int):
    """(warps, dynamic shared memory in bytes) of a block whose warps each keep so many bytes there."""
    warps = min(THREADS // WARP, SHARED_BYTES // row_bytes)
    if warps == 0:
        raise UserError(f"a row takes {row_bytes} bytes of shared memory, expected at most {SHARED_BYTES}: too wide")
    return warps, warps * row_bytes
