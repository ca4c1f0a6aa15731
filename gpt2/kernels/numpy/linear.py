"""Linear layer: y = x W^T + b, with W (outputs, inputs) as in llm.c; transposed views cost BLAS nothing."""

import numpy as np


def linear_forward(cores, out, inputs, weight, bias):
    """out (N, outputs) = inputs (N, inputs) @ weight.T + bias; bias (outputs,) or None."""

    def add_bias(rows, columns):
        out[rows, columns] += bias[columns]

    cores.matmul(inputs, weight.T, out, None if bias is None else add_bias)


def linear_backward(cores, dinputs, dweight, dbias, doutputs, inputs, weight, accumulate):
    """dinputs = doutputs @ weight; dweight = or += doutputs.T @ inputs; dbias = or += column sums."""
    sum_columns = bias_backward(dbias, doutputs, accumulate)
    backward_products(cores, dinputs, dweight, doutputs, inputs, weight, accumulate, None, sum_columns)


def bias_backward(dbias, doutputs, accumulate):
    """backward_products' finish_weight: dbias = or += the column sums of doutputs, where their weights are done."""
    ones = np.ones(len(doutputs), doutputs.dtype)

    def sum_columns(outputs, inputs):
        if inputs.start == 0:
            sums = ones @ doutputs[:, outputs]  # a matrix-vector product: faster than sum(axis=0)
            dbias[outputs] = dbias[outputs] + sums if accumulate else sums

    return sum_columns


def backward_products(cores, dinputs, dweight, doutputs, inputs, weight, accumulate, finish_inputs, finish_weight):
    """dinputs = doutputs @ weight and dweight (outputs, inputs) = or += doutputs.T @ inputs, side by side."""
    product = cores.scratch("dweight", dweight.shape, dweight.dtype) if accumulate else dweight

    def finish(rows, columns):
        if accumulate:
            dweight[rows, columns] += product[rows, columns]
        if finish_weight is not None:
            finish_weight(rows, columns)

    cores.matmuls((doutputs, weight, dinputs, finish_inputs), (doutputs.T, inputs, product, finish))
