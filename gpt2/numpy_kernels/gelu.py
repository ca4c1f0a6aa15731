"""GELU in GPT-2's tanh form (Hendrycks and Gimpel 2016), with the linear layer before it.

    y = x/2 (1 + tanh(u)) = x / h,    h = 1 + exp(-2u),    u = s (x + 0.044715 x^3),    s = sqrt(2/pi)
    dy/dx = (1 + (x - y) 2 du/dx) / h,    du/dx = s (1 + 3*0.044715 x^2)

Forward has all of the slope's parts at hand, so it leaves the slope where x was, and backward is one multiplication.
"""

import math

import numpy as np

SCALE = math.sqrt(2.0 / math.pi)
CUBIC = 0.044715


def linear_gelu_forward(cores, out, saved, inputs, weight, bias):
    """out (N, outputs) = gelu(inputs (N, inputs) @ weight.T + bias); saved (N, outputs) is for gelu_backward alone."""

    def finish(rows, columns):
        x, y = saved[rows, columns], out[rows, columns]
        block = max(1, cores.cache_bytes // (4 * x.shape[1] * x.itemsize))
        for start in range(0, len(x), block):
            some = slice(start, start + block)
            x[some] += bias[columns]
            _gelu_and_slope(cores, y[some], x[some])

    cores.matmul(inputs, weight.T, saved, finish)


def _gelu_and_slope(cores, y, x):
    """y = gelu(x), x = dy/dx."""
    square, h = (cores.scratch(name, x.shape, x.dtype) for name in ("square", "h"))
    np.multiply(x, x, out=square)
    square *= -2.0 * SCALE * CUBIC
    np.subtract(square, 2.0 * SCALE, out=h)
    h *= x
    with np.errstate(over="ignore"):  # x below -10: exp gives inf, and x / inf is right
        np.exp(h, out=h)
    h += 1.0
    np.divide(x, h, out=y)
    square *= -3.0
    square += 2.0 * SCALE
    x -= y
    x *= square
    x += 1.0
    x /= h


def gelu_backward(cores, dinputs, saved):
    """dinputs (N, width) holds the gradient of GELU's output before, of its input after."""
    cores.for_parts(
        len(saved), lambda start, stop: np.multiply(dinputs[start:stop], saved[start:stop], out=dinputs[start:stop])
    )
