"""LayerNorm over the channels (Ba, Kiros, Hinton 2016), alone and joined with the residual addition before it.

y = (x - mean) * rstd * weight + bias,    rstd = 1 / sqrt(var + 1e-5)
"""

import numpy as np

EPSILON = 1e-5


def layernorm_forward(cores, out, mean, rstd, inputs, weight, bias):
    """out, inputs (N, C); mean, rstd (N,), kept for backward; weight, bias (C,)."""

    def rows(start, stop):
        _normalize(cores, out[start:stop], mean[start:stop], rstd[start:stop], inputs[start:stop], weight, bias)

    cores.for_rows(len(inputs), 2 * inputs.strides[0], rows)


def residual_layernorm_forward(cores, residual, out, mean, rstd, inputs, branch, weight, bias):
    """residual = inputs + branch, out = LayerNorm(residual), one pass over the rows. All (N, C) but mean, rstd (N,)."""

    def rows(start, stop):
        x = residual[start:stop]
        np.add(inputs[start:stop], branch[start:stop], out=x)
        _normalize(cores, out[start:stop], mean[start:stop], rstd[start:stop], x, weight, bias)

    cores.for_rows(len(inputs), 4 * inputs.strides[0], rows)


def _normalize(cores, out, mean, rstd, x, weight, bias):
    np.mean(x, axis=1, out=mean)
    np.subtract(x, mean[:, None], out=out)
    np.einsum("nc,nc->n", out, out, out=rstd)
    rstd /= x.shape[1]
    rstd += EPSILON
    np.sqrt(rstd, out=rstd)
    np.reciprocal(rstd, out=rstd)
    out *= rstd[:, None]
    out *= weight
    out += bias


def layernorm_backward(cores, dinputs, dweight, dbias, doutputs, inputs, mean, rstd, weight, accumulate):
    """dinputs += gradient (the residual stream's gradient is already there); dweight, dbias = or +=.

    With n = (x - mean) rstd and g = dy * weight:  dx = rstd (g - mean_c(g) - n mean_c(g n)).
    """
    C = inputs.shape[1]
    if not accumulate:
        dweight[:] = 0.0
        dbias[:] = 0.0
    partial_sums = []

    def rows(start, stop):
        dy = doutputs[start:stop]
        normalized, g = (cores.scratch(name, dy.shape, dy.dtype) for name in ("normalized", "g"))
        np.subtract(inputs[start:stop], mean[start:stop, None], out=normalized)
        normalized *= rstd[start:stop, None]
        np.multiply(dy, normalized, out=g)
        partial_sums.append((start, g.sum(axis=0), dy.sum(axis=0)))
        g_normalized_mean = (g @ weight) / C
        np.multiply(dy, weight, out=g)
        g -= g.mean(axis=1, keepdims=True)
        normalized *= g_normalized_mean[:, None]
        g -= normalized
        g *= rstd[start:stop, None]
        dinputs[start:stop] += g

    cores.for_rows(len(inputs), 5 * inputs.strides[0], rows)
    for _, block_dweight, block_dbias in sorted(
        partial_sums, key=lambda sums: sums[0]
    ):  # one order, whatever the threads did
        dweight += block_dweight
        dbias += block_dbias
