"""Linear layers: y = x W^T + b, with W (outputs, inputs) as in llm.c; transposed views cost BLAS nothing.

One of them ends in GELU, in GPT-2's tanh form (Hendrycks and Gimpel 2016):

    y = x/2 (1 + tanh(u)) = x / h,    h = 1 + exp(-2u),    u = s (x + 0.044715 x^3),    s = sqrt(2/pi)
    dy/dx = (1 + (x - y) 2 du/dx) / h,    du/dx = s (1 + 3*0.044715 x^2)

Forward has all parts of the slope at hand. So it leaves the slope where x was, and backward is one multiplication.
"""

import numpy as np

from gpt2.kernels.numpy import loops


def linear_forward(cores, out, inputs, weight, bias):
    """out (N, outputs) = inputs (N, inputs) @ weight.T + bias; bias (outputs,) or None."""

    def add_bias(rows, columns):
        out[rows, columns] += bias[columns]

    cores.matmuls((inputs, weight.T, out, None if bias is None else add_bias))


def linear_gelu_forward(cores, out, saved, inputs, weight, bias):
    """out (N, outputs) = gelu(inputs (N, inputs) @ weight.T + bias); saved (N, outputs) is for backward alone."""

    def add_bias_and_gelu(rows, columns):
        loops.bias_gelu_and_slope(out, saved, bias, rows, columns)

    cores.matmuls((inputs, weight.T, saved, add_bias_and_gelu))


def linear_backward(cores, dinputs, dweight, dbias, doutputs, inputs, weight, accumulate):
    """dinputs = doutputs @ weight; dweight = or += doutputs.T @ inputs; dbias = or += column sums."""
    sum_columns = _bias_backward(dbias, doutputs, accumulate)
    backward_products(cores, dinputs, dweight, doutputs, inputs, weight, accumulate, None, sum_columns)


def gelu_linear_backward(cores, dinputs, dweight, dbias, doutputs, inputs, saved, weight, accumulate):
    """linear_backward after linear_gelu_forward: inputs are its `out`, and dinputs is the gradient of GELU's inputs."""

    def times_slope(rows, columns):
        dinputs[rows, columns] *= saved[rows, columns]

    sum_columns = _bias_backward(dbias, doutputs, accumulate)
    backward_products(cores, dinputs, dweight, doutputs, inputs, weight, accumulate, times_slope, sum_columns)


def _bias_backward(dbias, doutputs, accumulate):
    """The finish_weight of backward_products that makes dbias = or += the column sums of doutputs."""
    ones = np.ones(len(doutputs), doutputs.dtype)

    def sum_columns(outputs, inputs):
        if inputs.start == 0:  # once for each output, also where the weight's columns are cut
            sums = ones @ doutputs[:, outputs]  # a matrix-vector product: faster than sum(axis=0)
            dbias[outputs] = dbias[outputs] + sums if accumulate else sums

    return sum_columns


def backward_products(cores, dinputs, dweight, doutputs, inputs, weight, accumulate, finish_inputs, finish_weight):
    """dinputs = doutputs @ weight and dweight (outputs, inputs) = or += doutputs.T @ inputs, side by side.

    finish_inputs and finish_weight are called with each part of dinputs and dweight that is done, as in Cores.matmuls.
    """
    product = cores.scratch("dweight", dweight.shape, dweight.dtype) if accumulate else dweight

    def finish(rows, columns):
        if accumulate:
            dweight[rows, columns] += product[rows, columns]
        if finish_weight is not None:
            finish_weight(rows, columns)

    cores.matmuls((doutputs, weight, dinputs, finish_inputs), (doutputs.T, inputs, product, finish))
