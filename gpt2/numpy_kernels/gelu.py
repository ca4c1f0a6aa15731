"""GELU in GPT-2's tanh form (Hendrycks and Gimpel 2016), with the linear layer before it.

    y = x/2 (1 + tanh(u)) = x / h,    h = 1 + exp(-2u),    u = s (x + 0.044715 x^3),    s = sqrt(2/pi)
    dy/dx = (1 + (x - y) 2 du/dx) / h,    du/dx = s (1 + 3*0.044715 x^2)

Forward has all of the slope's parts at hand, so it leaves the slope where x was, and backward is one multiplication.
"""

import numpy as np

from gpt2.numpy_kernels import loops


def linear_gelu_forward(cores, out, saved, inputs, weight, bias):
    """out (N, outputs) = gelu(inputs (N, inputs) @ weight.T + bias); saved (N, outputs) is for gelu_backward alone."""

    def finish(rows, columns):
        loops.bias_gelu_and_slope(out, saved, bias, rows, columns)

    cores.matmul(inputs, weight.T, saved, finish)


def gelu_backward(cores, dinputs, saved):
    """dinputs (N, width) holds the gradient of GELU's output before, of its input after."""
    cores.for_parts(
        len(saved), lambda start, stop: np.multiply(dinputs[start:stop], saved[start:stop], out=dinputs[start:stop])
    )
