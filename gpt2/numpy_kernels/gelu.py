"""GELU in GPT-2's tanh form (Hendrycks and Gimpel 2016).

y = x/2 (1 + tanh(u)),    u = s (x + 0.044715 x^3),    s = sqrt(2/pi)
"""

import math

import numpy as np

SCALE = math.sqrt(2.0 / math.pi)
CUBIC = 0.044715


def _one_plus_tanh(out, square, x):
    """square = x^2, out = 1 + tanh(u)."""
    np.multiply(x, x, out=square)
    np.multiply(square, SCALE * CUBIC, out=out)
    out += SCALE
    out *= x
    np.tanh(out, out=out)
    out += 1.0


def gelu_forward(cores, out, inputs):
    """out, inputs (N, width)."""

    def rows(start, stop):
        x, y = inputs[start:stop], out[start:stop]
        _one_plus_tanh(y, cores.scratch("square", x.shape, x.dtype), x)
        y *= x
        y *= 0.5

    cores.for_rows(len(inputs), 3 * inputs.strides[0], rows)


def gelu_backward(cores, dinputs, doutputs, inputs):
    """dinputs = doutputs * dy/dx.

    With h = 1 + tanh(u):  dy/dx = h/2 (1 + x (2 - h) du/dx),  du/dx = s (1 + 3*0.044715 x^2).
    All (N, width); dinputs may be doutputs itself.
    """

    def rows(start, stop):
        x = inputs[start:stop]
        square, h = (cores.scratch(name, x.shape, x.dtype) for name in ("square", "h"))
        _one_plus_tanh(h, square, x)
        square *= 3.0 * SCALE * CUBIC
        square += SCALE
        square *= x
        slope = cores.scratch("slope", x.shape, x.dtype)
        np.subtract(2.0, h, out=slope)
        slope *= square
        slope += 1.0
        slope *= h
        slope *= 0.5
        np.multiply(doutputs[start:stop], slope, out=dinputs[start:stop])

    cores.for_rows(len(inputs), 6 * inputs.strides[0], rows)
