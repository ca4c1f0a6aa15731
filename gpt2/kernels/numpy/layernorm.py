"""LayerNorm over the channels (Ba, Kiros, Hinton 2016), alone and joined with the residual addition before it.

y = (x - mean) * rstd * weight + bias,    rstd = 1 / sqrt(var + 1e-5)
"""

from functools import partial

import numpy as np

from gpt2.kernels.numpy import loops

EPSILON = 1e-5


def layernorm_forward(cores, out, mean, rstd, inputs, weight, bias):
    """out, inputs (N, C); mean, rstd (N,), kept for backward; weight, bias (C,)."""
    cores.for_parts(len(inputs), partial(loops.layernorm, out, mean, rstd, inputs, weight, bias, EPSILON))


def residual_layernorm_forward(cores, residual, out, mean, rstd, inputs, branch, weight, bias):
    """residual = inputs + branch, out = LayerNorm(residual), one pass over the rows. All (N, C) but mean, rstd (N,)."""
    rows = partial(loops.residual_layernorm, residual, out, mean, rstd, inputs, branch, weight, bias, EPSILON)
    cores.for_parts(len(inputs), rows)


def layernorm_backward(cores, dinputs, dweight, dbias, doutputs, inputs, mean, rstd, weight, accumulate):
    """dinputs += gradient (the residual stream's gradient is already there); dweight, dbias = or +=.

    With n = (x - mean) rstd and g = dy * weight:  dx = rstd (g - mean_c(g) - n mean_c(g n)).
    """
    if not accumulate:
        dweight[:] = 0.0
        dbias[:] = 0.0
    partial_sums = {}

    def rows(start, stop):
        sums = partial_sums[start] = np.zeros((2, len(weight)), weight.dtype)
        loops.layernorm_backward(dinputs, sums[0], sums[1], doutputs, inputs, mean, rstd, weight, start, stop)

    cores.for_parts(len(inputs), rows)
    for start in sorted(partial_sums):  # always in the same order, whichever thread was first: the same bits
        dweight += partial_sums[start][0]
        dbias += partial_sums[start][1]
