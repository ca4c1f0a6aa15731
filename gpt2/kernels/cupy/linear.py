"""Linear layers on the device: matrix products (device.matmul), with biases and GELU.

linear_gelu_forward stores GELU's input in `saved`.
"""

from gpt2.kernels.cupy.launch import bias_gelu_forward, column_sums, gelu_backward


def linear_forward(device, out, inputs, weight, bias):
    """Compute out (N, outputs) = inputs (N, inputs) @ weight.T + bias; bias (outputs,) or None."""
    device.matmul(out, inputs, weight.T, bias=bias)


def linear_gelu_forward(device, out, saved, inputs, weight, bias):
    """Compute out (N, outputs) = gelu(inputs (N, inputs) @ weight.T + bias); saved (N, outputs): GELU's input."""

    def in_epilogue():
        device.matmul(out, inputs, weight.T, bias=bias, gelu_input=saved)

    def apart():
        device.matmul(saved, inputs, weight.T)
        bias_gelu_forward(device, out, saved, bias)

    device.faster_of("gelu", out, in_epilogue, apart)


def linear_backward(device, dinputs, dweight, dbias, doutputs, inputs, weight, accumulate):
    """Compute dinputs = doutputs @ weight; dweight = or += doutputs.T @ inputs; dbias (or None) = or += column sums.

    An epilogue overwrites its sums: to accumulate, sum into scratch, and add that.
    """
    device.matmul(dinputs, doutputs, weight)
    if dbias is None:
        return device.matmul(dweight, doutputs.T, inputs, accumulate=accumulate)

    def in_epilogue():
        sums = device.scratch("bias_sums", dbias.shape, dbias.dtype) if accumulate else dbias
        device.matmul(dweight, doutputs.T, inputs, left_sums=sums, accumulate=accumulate)
        if accumulate:
            column_sums(device, dbias, sums.reshape(1, -1), accumulate)

    def apart():
        device.matmul(dweight, doutputs.T, inputs, accumulate=accumulate)
        column_sums(device, dbias, doutputs, accumulate)

    device.faster_of("bias gradient", dweight, in_epilogue, apart, repeatable=not accumulate)


def gelu_linear_backward(device, dinputs, dweight, doutputs, inputs, saved, weight, accumulate):
    """Run linear_backward through a linear_gelu_forward, whose `out` is `inputs`: dinputs = the gradient of `saved`."""

    def in_epilogue():
        device.matmul(dinputs, doutputs, weight, dgelu_input=saved)

    def apart():
        device.matmul(dinputs, doutputs, weight)
        gelu_backward(device, dinputs, saved)

    device.faster_of("dgelu", dinputs, in_epilogue, apart)
    device.matmul(dweight, doutputs.T, inputs, accumulate=accumulate)
