"""AdamW (Loshchilov and Hutter 2019) on a flat range, and the sum of squares that clipping needs.

The moments are kept unscaled: m = sum b1^(t-i) g_i and v = sum b2^(t-i) g_i^2. The usual factors (1-b1), (1-b2) and
the bias corrections are constants of a step, and go into the step size and epsilon:

    p -= lr (mhat / (sqrt(vhat) + eps) + weight_decay p),   mhat = m (1-b1)/(1-b1^t),   vhat = v (1-b2)/(1-b2^t)
"""

import math

from gpt2.kernels.numpy import loops


def adamw(
    cores, parameters, gradients, m, v, decaying, step, lr, beta1, beta2, eps, weight_decay, gradient_scale,
    master=None, first=0, rounding_seed=None,
):  # fmt: skip
    """Update parameters, m and v, flat arrays of one length, with gradients * gradient_scale. `step` counts from 1.

    decaying: the ranges [(start, stop), ...] that weight decay applies to, in order.
    master, first, rounding_seed: for bfloat16 parameters, which this set does not have.
    """
    assert master is None, "the numpy kernels have no bfloat16 parameters"
    root = math.sqrt((1.0 - beta2) / (1.0 - beta2**step))
    step_size = lr * (1.0 - beta1) / (1.0 - beta1**step) / root
    ranges = _ranges(decaying, len(parameters), 1.0 - lr * weight_decay)
    real = parameters.dtype.type

    def part(start, stop):
        for low, high, keep in ranges:
            some = slice(max(low, start), min(high, stop))
            if some.start < some.stop:
                arrays = [array[some] for array in (parameters, gradients, m, v)]
                loops.adamw(*arrays, *map(real, (beta1, beta2, step_size, eps / root, keep, gradient_scale)))

    cores.for_parts(len(parameters), part)


def _ranges(decaying, size, keep):
    """Cut [0, size) into ranges (start, stop, factor of the parameters): `keep` where they decay, else 1."""
    ranges = []
    end = 0
    for low, high in decaying:
        if low < high:
            ranges += [(end, low, 1.0), (low, high, keep)]
            end = high
    return [*ranges, (end, size, 1.0)]


def sum_of_squares(cores, flat) -> float:
    """Return the sum of squares of a flat range, always added in the same order."""
    return loops.sum_of_squares(flat)
