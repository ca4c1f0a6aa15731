"""GELU in GPT-2's tanh form (Hendrycks and Gimpel 2016), with the linear layer before it.

    y = x/2 (1 + tanh(u)) = x / h,    h = 1 + exp(-2u),    u = s (x + 0.044715 x^3),    s = sqrt(2/pi)
    dy/dx = (1 + (x - y) 2 du/dx) / h,    du/dx = s (1 + 3*0.044715 x^2)

Forward has all of the slope's parts at hand, so it leaves the slope where x was, and backward is one multiplication.
"""

from gpt2.kernels.numpy import loops
from gpt2.kernels.numpy.linear import backward_products, bias_backward


def linear_gelu_forward(cores, out, saved, inputs, weight, bias):
    """out (N, outputs) = gelu(inputs (N, inputs) @ weight.T + bias); saved (N, outputs) is for backward alone."""

    def finish(rows, columns):
        loops.bias_gelu_and_slope(out, saved, bias, rows, columns)

    cores.matmul(inputs, weight.T, saved, finish)


def gelu_linear_backward(cores, dinputs, dweight, dbias, doutputs, inputs, saved, weight, accumulate):
    """linear_backward after linear_gelu_forward: inputs are its `out`, and dinputs is the gradient of GELU's inputs."""

    def times_slope(rows, columns):
        dinputs[rows, columns] *= saved[rows, columns]

    sum_columns = bias_backward(dbias, doutputs, accumulate)
    backward_products(cores, dinputs, dweight, doutputs, inputs, weight, accumulate, times_slope, sum_columns)
