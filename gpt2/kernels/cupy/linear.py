"""Linear layers and the tied head on the device: matrix products (device.matmul), and what comes before or after them.

What forwards leave for backwards: `saved` is GELU's input, `exponentials` is dlogits; `row_scale` stays as it is.
"""

from gpt2.kernels.cupy.launch import bias_gelu_forward, column_sums, cross_entropy, gelu_backward

LOGITS_BYTES = 1 << 30  # of the logits at once where no gradient is wanted


def linear_forward(device, out, inputs, weight, bias):
    """out (N, outputs) = inputs (N, inputs) @ weight.T + bias; bias (outputs,) or None."""
    device.matmul(out, inputs, weight.T, bias=bias)


def linear_gelu_forward(device, out, saved, inputs, weight, bias):
    """out (N, outputs) = gelu(inputs (N, inputs) @ weight.T + bias); saved (N, outputs): GELU's input, for backward."""

    def in_epilogue():
        device.matmul(out, inputs, weight.T, bias=bias, gelu_input=saved)

    def apart():
        device.matmul(saved, inputs, weight.T)
        bias_gelu_forward(device, out, saved, bias)

    device.faster_of("gelu", out, in_epilogue, apart)


def linear_backward(device, dinputs, dweight, dbias, doutputs, inputs, weight, accumulate):
    """dinputs = doutputs @ weight; dweight = or += doutputs.T @ inputs; dbias = or += column sums."""
    device.matmul(dinputs, doutputs, weight)
    _parameters_backward(device, dweight, dbias, doutputs, inputs, accumulate)


def gelu_linear_backward(device, dinputs, dweight, dbias, doutputs, inputs, saved, weight, accumulate):
    """linear_backward after linear_gelu_forward: inputs are its `out`, and dinputs is the gradient of `saved`."""

    def in_epilogue():
        device.matmul(dinputs, doutputs, weight, dgelu_input=saved)

    def apart():
        device.matmul(dinputs, doutputs, weight)
        gelu_backward(device, dinputs, saved)

    device.faster_of("dgelu", dinputs, in_epilogue, apart)
    _parameters_backward(device, dweight, dbias, doutputs, inputs, accumulate)


def _parameters_backward(device, dweight, dbias, doutputs, inputs, accumulate):
    """An epilogue overwrites a bias's gradient, so what is to be added passes through a row of its own."""

    def in_epilogue():
        sums = device.scratch("bias_sums", dbias.shape, dbias.dtype) if accumulate else dbias
        device.matmul(dweight, doutputs.T, inputs, left_sums=sums, accumulate=accumulate)
        if accumulate:
            column_sums(device, dbias, sums.reshape(1, -1), accumulate)

    def apart():
        device.matmul(dweight, doutputs.T, inputs, accumulate=accumulate)
        column_sums(device, dbias, doutputs, accumulate)

    device.faster_of("bias gradient", dweight, in_epilogue, apart, repeatable=not accumulate)


def classifier_forward(device, losses, exponentials, row_scale, inputs, wte, targets, vocab_size, scale):
    """losses (N,) float32 of inputs (N, C) against host targets (N,), with wte (Vp, C).

    exponentials (N, Vp) gets dlogits * scale; None where only the losses are wanted. The pad columns [V, Vp) take no
    part, and get gradient 0.
    """
    device_targets = device.upload("targets", targets)
    if exponentials is not None:
        device.matmul(exponentials, inputs, wte.T)
        return cross_entropy(device, losses, exponentials, device_targets, vocab_size, scale, True)
    rows = max(1, min(len(inputs), LOGITS_BYTES // (len(wte) * inputs.itemsize)))
    for start in range(0, len(inputs), rows):
        some = slice(start, start + rows)
        logits = device.scratch("logits", (len(inputs[some]), len(wte)), inputs.dtype)
        device.matmul(logits, inputs[some], wte.T)
        cross_entropy(device, losses[some], logits, device_targets[some], vocab_size, scale, False)


def classifier_backward(device, dinputs, dwte, exponentials, row_scale, inputs, wte, accumulate):
    """dinputs (N, C) = dlogits @ wte; dwte (Vp, C) = or += dlogits.T @ inputs; from what forward left."""
    device.matmul(dinputs, exponentials, wte)
    device.matmul(dwte, exponentials.T, inputs, accumulate=accumulate)
