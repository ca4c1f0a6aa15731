"""Launches of the elementwise kernels and reductions: arguments, grids and blocks.

`device` is a Device (device.py), or tests/gpu/cuda_shim on a CPU. Arrays are C-contiguous. Unless stated otherwise, the
arrays of a call are all float32 or all bfloat16. Except in adamw and sum_of_squares, they start at multiples of 16
bytes. Shapes as in gpt2/kernels/__init__.py. The docstrings of gpt2/kernels/numpy explain the arguments.
"""

import math

import numpy as np

from gpt2.errors import UserError
from gpt2.rounding import SPLITMIX64_STEP

WARP = 32
THREADS = 256
ACCESS_BYTES = 16
ALIGNED_ELEMENTS = 8  # tensors in a flat buffer begin at multiples of it: at least 16 bytes
# Blocks in the first of two phases of a sum.
PARTIAL_BLOCKS = 512
COLUMN_SUM_BLOCKS = 128
SHARED_BYTES = 48 << 10  # dynamic shared memory that a block gets without a request to the driver
RESERVED_BYTES = 1 << 10  # shared memory of a block that CUDA takes for itself
WARPS_AT_ONCE = 32  # warps of LayerNorm's backward for which a multiprocessor has registers


def embedding_forward(device, out, tokens, wte, wpe, first_token=0):
    """Set out[b, t] = wte[tokens[b, t]] + wpe[t].  out (B, T, C), host tokens (B, T), wte (Vp, C), wpe (context, C)."""
    B, T, C = out.shape
    arguments = (out, device.upload("tokens", tokens - first_token), wte, wpe, *int32(len(wte), B * T, T, C))
    device.launch("embedding", storage(out), "embedding_forward", _grid(out), (THREADS,), arguments)


def embedding_backward(device, dwte, dwpe, dout, tokens, accumulate, first_token=0):
    """Add dwte[token] += the sum of dout (B, T, C) over the token's positions; dwpe[t] = or += the sum over b.

    The host sorts tokens while the device is busy with backward's earlier kernels.
    """
    B, T, C = dout.shape
    order = np.argsort(tokens, axis=None, kind="stable")
    sorted_tokens = tokens.reshape(-1)[order] - first_token
    known = slice(*np.searchsorted(sorted_tokens, (0, len(dwte))))
    if count := known.stop - known.start:
        order = device.upload("order", order[known])
        sorted_tokens = device.upload("sorted", sorted_tokens[known])
        chunks = math.ceil(C * dout.itemsize / (WARP * ACCESS_BYTES))
        arguments = (dwte, dout, order, sorted_tokens, *int32(count, C))
        grid = (count, chunks)
        block = (WARP, THREADS // WARP)
        device.launch("embedding", storage(dout), "embedding_backward_tokens", grid, block, arguments)
    if dwpe is not None:
        arguments = (dwpe, dout, *int32(B, T, len(dwpe), C, accumulate))
        device.launch("embedding", storage(dout), "embedding_backward_positions", _grid(dwpe), (THREADS,), arguments)


def add(device, out, first, second, bias=None):
    """Set out = first + second, all of one shape; or with a bias (width,), out (N, width) = first + (second + bias)."""
    arguments = (out, first, second, bias, np.int64(out.size), np.int32(out.shape[-1]))
    device.launch("add", storage(out), "add", _grid(out), (THREADS,), arguments)


def layernorm_forward(device, out, mean, rstd, inputs, weight, bias):
    """Compute out = LayerNorm(inputs), both (N, C); mean, rstd (N,) float32, kept for backward; weight, bias (C,)."""
    residual_layernorm_forward(device, None, out, mean, rstd, inputs, None, None, weight, bias)


def residual_layernorm_forward(device, residual, out, mean, rstd, inputs, branch, branch_bias, weight, bias):
    """Compute residual = inputs + (branch + branch_bias), out = LayerNorm(residual).

    With None for residual, branch and its bias: LayerNorm(inputs).
    """
    N, C = inputs.shape
    row_bytes = C * inputs.itemsize  # of shared memory, for each warp
    warps = min(THREADS // WARP, SHARED_BYTES // row_bytes)
    if warps == 0:
        raise _too_wide(row_bytes, SHARED_BYTES)
    arguments = (residual, out, mean, rstd, inputs, branch, branch_bias, weight, bias, *int32(N, C))
    grid = (math.ceil(N / warps),)
    block = (warps * WARP,)
    device.launch("layernorm", storage(out), "residual_layernorm_forward", grid, block, arguments, warps * row_bytes)


def layernorm_backward(
    device, dinputs, dweight, dbias, column_sums, doutputs, inputs, mean, rstd, weight, accumulate
):  # fmt: skip
    """Add LayerNorm's gradient to dinputs (N, C), the residual stream's gradient; dweight, dbias (C,) = or +=."""
    N, C = dinputs.shape
    kinds = 2 if column_sums is None else 3
    blocks, warps, shared_bytes = _lasting_blocks(device, kinds * C * np.dtype(np.float32).itemsize)
    blocks = min(math.ceil(N / warps), blocks)
    partial_sums = device.scratch("partial_sums", (blocks, kinds, C), np.float32)
    arguments = (dinputs, partial_sums, doutputs, inputs, mean, rstd, weight, *int32(N, C, kinds))
    block = (warps * WARP,)
    device.launch("layernorm", storage(dinputs), "layernorm_backward", (blocks,), block, arguments, shared_bytes)
    arguments = (dweight, dbias, column_sums, partial_sums, *int32(blocks, C, accumulate))
    grid = (math.ceil(kinds * C / WARP),)
    block = (WARP, THREADS // WARP)
    device.launch("layernorm", storage(dweight), "layernorm_backward_parameters", grid, block, arguments)


def bias_gelu_forward(device, out, saved, bias):
    """Finish a linear_gelu_forward: saved (N, width) += bias (width,); out (N, width) = gelu(saved)."""
    arguments = (out, saved, bias, np.int64(saved.size), np.int32(len(bias)))
    device.launch("gelu", storage(out), "bias_gelu_forward", _grid(out), (THREADS,), arguments)


def gelu_backward(device, dinputs, saved):
    """Replace the gradient of GELU's output in dinputs (N, width) by the gradient of its input."""
    arguments = (dinputs, saved, np.int64(saved.size))
    device.launch("gelu", storage(dinputs), "gelu_backward", _grid(dinputs), (THREADS,), arguments)


def column_sums(device, sums, rows, accumulate):
    """Compute sums (width,) = or += the column sums of rows (N, width)."""
    N, width = rows.shape
    block = (WARP, THREADS // WARP)
    blocks = min(math.ceil(N / block[1]), COLUMN_SUM_BLOCKS)
    partial_sums = device.scratch("partial_sums", (blocks, width), np.float32)
    pack = ACCESS_BYTES // rows.itemsize
    grid = (math.ceil(width / (WARP * pack if width % pack == 0 else WARP)), blocks)
    device.launch("column_sums", storage(rows), "column_sums", grid, block, (partial_sums, rows, *int32(N, width)))
    arguments = (sums, partial_sums, *int32(blocks, width, accumulate))
    grid = (math.ceil(width / WARP),)
    device.launch("column_sums", storage(sums), "sum_of_column_sums", grid, block, arguments)


def adamw(
    device, parameters, gradients, m, v, decaying, step, lr, beta1, beta2, eps, weight_decay, gradient_scale,
    master=None, first=0, rounding_seed=None,
):  # fmt: skip
    """Update flat arrays of one length in place: all float32 except the gradients.

    master: the float32 copy of bfloat16 parameters. It is updated, and then rounded into them (see round_parameters).
    """
    root = math.sqrt((1.0 - beta2) / (1.0 - beta2**step))  # as derived in kernels/numpy/adamw.py
    step_size = lr * (1.0 - beta1) / (1.0 - beta1**step) / root
    numbers = beta1, beta2, step_size, eps / root, 1.0 - lr * weight_decay, gradient_scale
    ranges = device.constant(np.array(decaying, np.int64).reshape(-1, 2))
    updated = parameters if master is None else master
    rounded = None if master is None else parameters
    arguments = (updated, m, v, gradients, ranges, np.int32(len(decaying)), *map(np.float32, numbers))
    arguments += (np.int64(len(updated)), rounded, *_rounding(rounding_seed, first))
    device.launch("adamw", storage(gradients), "adamw", _grid(updated), (THREADS,), arguments)


def round_parameters(device, rounded, values, rounding_seed=None, first=0):
    """Set rounded (n,) bfloat16 = values (n,) float32: to nearest, ties to even; with a rounding_seed stochastically.

    The draw of an element depends only on the seed and its index `first` + i (gpt2/rounding.py).
    """
    if len(values):
        arguments = (rounded, values, np.int64(len(values)), *_rounding(rounding_seed, first))
        device.launch("adamw", storage(values), "round_parameters", _grid(values), (THREADS,), arguments)


def _rounding(seed, first):
    """Return the kernels' `stochastic` and `state`, the splitmix64 state of the range's first element."""
    if seed is None:
        return np.int32(False), np.uint64(0)
    return np.int32(True), np.uint64((seed + (first + 1) * SPLITMIX64_STEP) % 2**64)


def sum_of_squares(device, flat) -> float:
    """Return the sum of squares of a flat range. Waits for the device."""
    blocks = min(_grid(flat)[0], PARTIAL_BLOCKS)
    if blocks == 0:
        return 0.0
    partial_sums = device.scratch("partial_sums", (blocks,), np.float32)
    total = device.scratch("total", (1,), np.float64)
    arguments = (partial_sums, flat, np.int64(len(flat)))
    device.launch("sum_of_squares", storage(flat), "sum_of_squares", (blocks,), (THREADS,), arguments)
    arguments = (total, partial_sums, np.int32(blocks))
    device.launch("sum_of_squares", storage(flat), "sum_of_partials", (1,), (THREADS,), arguments)
    return float(device.download(total)[0])


def storage(array) -> str:
    """Return which of compile.py's STORAGES an array has."""
    return {4: "float32", 2: "bfloat16"}[array.itemsize]


def int32(*numbers):
    """Return kernel arguments of type int."""
    return tuple(np.int32(number) for number in numbers)


def _grid(array):
    """Return a grid with one thread for each 16 bytes of the array; the kernels loop if that is too few."""
    return (math.ceil(array.size * array.itemsize / (ACCESS_BYTES * THREADS)),)


def _lasting_blocks(device, row_bytes: int):
    """Return (blocks, warps, dynamic shared memory in bytes) of a kernel whose blocks all run at the same time.

    As many warps as fit run on the multiprocessors, each with row_bytes of shared memory.
    """

    def blocks_at_once(warps):
        return min(device.multiprocessor_bytes // (warps * row_bytes + RESERVED_BYTES), WARPS_AT_ONCE // warps)

    warps = max(range(1, THREADS // WARP + 1), key=lambda warps: (warps * blocks_at_once(warps), warps))
    if blocks_at_once(warps) == 0:
        raise _too_wide(row_bytes, device.multiprocessor_bytes)
    return device.multiprocessors * blocks_at_once(warps), warps, warps * row_bytes


def _too_wide(row_bytes: int, most: int) -> UserError:
    return UserError(f"a row takes {row_bytes} bytes of shared memory, expected at most {most}: too wide")
