"""Embedding, additions, LayerNorm (Ba, Kiros, Hinton 2016) and linear layers.

LayerNorm normalizes over the channels, alone or fused with the residual addition before it:

    y = (x - mean) * rstd * weight + bias,    rstd = 1 / sqrt(var + 1e-5)

Linear layers are y = x W^T + b, with W (outputs, inputs) as in llm.c; BLAS reads transposed views at no cost. One of
them ends in GELU, in GPT-2's tanh form (Hendrycks and Gimpel 2016):

    y = x/2 (1 + tanh(u)) = x / h,    h = 1 + exp(-2u),    u = s (x + 0.044715 x^3),    s = sqrt(2/pi)
    dy/dx = (1 + (x - y) 2 du/dx) / h,    du/dx = s (1 + 3*0.044715 x^2)

Forward computes all terms of the slope anyway. So it stores the slope instead of x, and backward is one multiplication.
"""

from functools import partial

import numpy as np

from gpt2.kernels.numpy import loops

EPSILON = 1e-5
ROWS = 128  # rows that one float32 sum adds up: a sum over all rows of a batch would round small terms away


def embedding_forward(cores, out, tokens, wte, wpe, first_token=0):
    """Compute out[b, t] = wte[tokens[b, t]] + wpe[t].  out (B, T, C), tokens (B, T) int, wte (Vp, C), wpe (context, C).

    With a vocabulary shard, whose rows begin at first_token, out is this shard's term of the sum over shards: tokens
    of other shards count 0, and wpe is None if another tp rank adds it.
    """
    for sequence, row in zip(out, tokens - first_token, strict=True):
        np.take(wte, row, axis=0, out=sequence, mode="clip")
        sequence[(row < 0) | (row >= len(wte))] = 0.0
        if wpe is not None:
            sequence += wpe[: len(sequence)]


def embedding_backward(cores, dwte, dwpe, dout, tokens, accumulate, first_token=0):
    """Add dwte[token] += the sum of dout over the token's positions; dwpe[t] = or += the sum over b.

    dwte already holds the tied head's gradient, so it is not overwritten. Rows are sorted by token and summed group by
    group: no scatter with collisions, and always the same order of additions. Vocabulary shards as in
    embedding_forward.
    """
    T, C = dout.shape[1:]
    order = np.argsort(tokens, axis=None, kind="stable")
    sorted_tokens = tokens.reshape(-1)[order] - first_token
    known = slice(*np.searchsorted(sorted_tokens, (0, len(dwte))))
    order = order[known]
    sorted_tokens = sorted_tokens[known]
    if len(order):
        group_starts = np.flatnonzero(np.r_[True, sorted_tokens[1:] != sorted_tokens[:-1]])
        rows = cores.scratch("embedding", (len(order), C), dout.dtype)
        np.take(dout.reshape(-1, C), order, axis=0, out=rows, mode="clip")
        dwte[sorted_tokens[group_starts]] += np.add.reduceat(rows, group_starts, axis=0)
    if dwpe is None:
        return
    if not accumulate:
        dwpe[:] = 0.0
    for sequence in dout:
        dwpe[:T] += sequence


def add(cores, out, first, second, bias=None):
    """Set out = first + second, all of one shape; or with a bias (width,), out (N, width) = first + (second + bias).

    Without a bias, out may be one of the two.
    """
    if bias is None:
        np.add(first, second, out=out)
    else:
        np.add(second, bias, out=out)
        out += first


def layernorm_forward(cores, out, mean, rstd, inputs, weight, bias):
    """Compute out = LayerNorm(inputs), both (N, C); mean, rstd (N,), kept for backward; weight, bias (C,)."""
    cores.for_parts(len(inputs), partial(loops.layernorm, loops.bits(out), mean, rstd, inputs, weight, bias, EPSILON))


def residual_layernorm_forward(cores, residual, out, mean, rstd, inputs, branch, branch_bias, weight, bias):
    """Compute residual = inputs + (branch + branch_bias), out = LayerNorm(residual), in one pass over the rows.

    All are (N, C), except mean, rstd (N,) and branch_bias, weight, bias (C,).
    """
    arrays = residual, loops.bits(out), mean, rstd, inputs, branch, branch_bias, weight, bias
    cores.for_parts(len(inputs), partial(loops.residual_layernorm, *arrays, EPSILON))


def layernorm_backward(
    cores, dinputs, dweight, dbias, column_sums, doutputs, inputs, mean, rstd, weight, accumulate
):  # fmt: skip
    """Add LayerNorm's gradient to dinputs, the gradient of the residual stream; dweight, dbias = or +=.

    column_sums (C,), unless None, = the column sums of dinputs afterwards: the gradient of branch_bias.
    With n = (x - mean) rstd and g = dy * weight:  dx = rstd (g - mean_c(g) - n mean_c(g n)).
    """
    if not accumulate:
        dweight[:] = 0.0
        dbias[:] = 0.0
    partial_sums = {}

    def rows(start, stop):
        sums = partial_sums[start] = np.zeros((3, len(weight)), weight.dtype)
        for low in range(start, stop, ROWS):
            of_block = np.zeros_like(sums)
            arrays = dinputs, *of_block, doutputs, inputs, mean, rstd, weight
            loops.layernorm_backward(*arrays, low, min(low + ROWS, stop))
            sums += of_block

    cores.for_parts(len(inputs), rows)
    for start in sorted(partial_sums):  # in a fixed order, so that sums have the same bits in each run
        dweight += partial_sums[start][0]
        dbias += partial_sums[start][1]
    if column_sums is not None:
        column_sums[:] = sum(partial_sums[start][2] for start in sorted(partial_sums))


def column_sums(cores, sums, rows, accumulate):
    """Compute sums (width,) = or += the column sums of rows (N, width)."""
    # A matrix-vector product: faster than sum(axis=0).
    total = np.ones(len(rows), rows.dtype) @ rows
    sums[:] = sums + total if accumulate else total


def linear_forward(cores, out, inputs, weight, bias):
    """Compute out (N, outputs) = inputs (N, inputs) @ weight.T + bias; bias (outputs,) or None."""

    def add_bias(result, rows, columns):
        loops.add_bias(result, bias, columns)

    cores.matmuls((inputs, weight.T, out, None if bias is None else add_bias))


def linear_gelu_forward(cores, out, saved, inputs, weight, bias):
    """Set out (N, outputs) = gelu(inputs (N, inputs) @ weight.T + bias); saved (N, outputs) is for backward alone."""

    def add_bias_and_gelu(result, rows, columns):
        loops.bias_gelu_and_slope(loops.bits(out[rows]), result, bias, columns)

    cores.matmuls((inputs, weight.T, saved, add_bias_and_gelu))


def linear_backward(cores, dinputs, dweight, dbias, doutputs, inputs, weight, accumulate):
    """Compute dinputs = doutputs @ weight; dweight = or += doutputs.T @ inputs; dbias (or None) = or += column sums."""
    ones = np.ones(ROWS, dweight.dtype)

    def sum_columns(_, outputs, inputs):
        if inputs.start == 0:  # once for each output, even if the weight's columns are cut
            rows = cores.exact("bias", doutputs[:, outputs])
            blocks = [rows[start : start + ROWS] for start in range(0, len(rows), ROWS)]
            # Matrix-vector products: faster than sum(axis=0).
            sums = sum(ones[: len(block)] @ block for block in blocks)
            dbias[outputs] = dbias[outputs] + sums if accumulate else sums

    finish_weight = None if dbias is None else sum_columns
    backward_products(cores, dinputs, dweight, doutputs, inputs, weight, accumulate, None, finish_weight)


def gelu_linear_backward(cores, dinputs, dweight, doutputs, inputs, saved, weight, accumulate):
    """Run linear_backward after a linear_gelu_forward with `out` = `inputs`: dinputs = the gradient of GELU's input."""

    def times_slope(result, rows, columns):
        loops.multiply_by(result, loops.bits(saved[rows]), columns)

    backward_products(cores, dinputs, dweight, doutputs, inputs, weight, accumulate, times_slope, None)


def backward_products(cores, dinputs, dweight, doutputs, inputs, weight, accumulate, finish_inputs, finish_weight):
    """Compute dinputs = doutputs @ weight and dweight (outputs, inputs) = or += doutputs.T @ inputs, at the same time.

    finish_inputs and finish_weight are called for each finished block of dinputs and dweight, as in Cores.multiply.
    """
    product = cores.scratch("dweight", dweight.shape, dweight.dtype) if accumulate else dweight

    def finish(result, rows, columns):
        if accumulate:
            dweight[rows, columns] += result[:, columns]
        if finish_weight is not None:
            finish_weight(result, rows, columns)

    cores.matmuls((doutputs, weight, dinputs, finish_inputs), (doutputs.T, inputs, product, finish))
