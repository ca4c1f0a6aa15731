"""Linear layer: y = x W^T + b, with W (outputs, inputs) as in llm.c; transposed views cost BLAS nothing."""

import numpy as np


def linear_forward(cores, out, inputs, weight, bias):
    """out (N, outputs) = inputs (N, inputs) @ weight.T + bias; bias (outputs,) or None."""
    np.matmul(inputs, weight.T, out=out)
    if bias is not None:
        cores.for_rows(len(out), out.strides[0], lambda start, stop: np.add(out[start:stop], bias, out=out[start:stop]))


def linear_backward(cores, dinputs, dweight, dbias, doutputs, inputs, weight, accumulate):
    """dinputs = doutputs @ weight; dweight = or += doutputs.T @ inputs; dbias = or += column sums (None: no bias)."""
    np.matmul(doutputs, weight, out=dinputs)
    if accumulate:
        product = cores.scratch("dweight", dweight.shape, dweight.dtype)
        np.matmul(doutputs.T, inputs, out=product)
        cores.for_rows(
            len(dweight), 2 * dweight.strides[0], lambda a, b: np.add(dweight[a:b], product[a:b], out=dweight[a:b])
        )
    else:
        np.matmul(doutputs.T, inputs, out=dweight)
    if dbias is not None:
        column_sums = (
            np.ones(len(doutputs), doutputs.dtype) @ doutputs
        )  # a matrix-vector product: faster than sum(axis=0)
        np.add(dbias, column_sums, out=dbias) if accumulate else np.copyto(dbias, column_sums)
