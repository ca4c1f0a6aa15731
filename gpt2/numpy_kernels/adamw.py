"""AdamW (Loshchilov and Hutter 2019) on a flat range, and the sum of squares that clipping needs.

Kept are the unscaled moments m = sum b1^(t-i) g_i and v = sum b2^(t-i) g_i^2. The usual factors (1-b1), (1-b2) and the
bias corrections are constants of a step, so they go into the step size and epsilon, and two passes fall away:

    p -= lr (mhat / (sqrt(vhat) + eps) + weight_decay p),   mhat = m (1-b1)/(1-b1^t),   vhat = v (1-b2)/(1-b2^t)
"""

import math

import numpy as np

BLOCK = 512 << 10  # elements: few calls, as handing the interpreter lock over costs more than a miss in L2


def adamw(cores, parameters, gradients, m, v, decaying, step, lr, beta1, beta2, eps, weight_decay, gradient_scale):
    """One step, in place, on flat arrays of one length; `step` counts from 1; gradients times gradient_scale count.

    decaying: the ranges [(start, stop), ...] that weight decay is for, in order.
    """
    root = math.sqrt((1.0 - beta2) / (1.0 - beta2**step))
    step_size = lr * (1.0 - beta1) / (1.0 - beta1**step) / root
    scaled_eps = eps / root

    def block(start, stop):
        p, g, first, second = (array[start:stop] for array in (parameters, gradients, m, v))
        scaled, t = (cores.scratch(name, p.shape, p.dtype) for name in ("scaled", "t"))
        if gradient_scale != 1.0:
            g = np.multiply(g, gradient_scale, out=scaled)
        first *= beta1
        first += g
        np.multiply(g, g, out=t)
        second *= beta2
        second += t
        np.sqrt(second, out=t)
        t += scaled_eps
        np.divide(first, t, out=t)
        t *= step_size
        for low, high in decaying:
            if low < stop and high > start:
                parameters[max(low, start) : min(high, stop)] *= 1.0 - lr * weight_decay
        p -= t

    cores.for_blocks(len(parameters), BLOCK, block)


def sum_of_squares(cores, flat) -> float:
    """Sum of squares of a flat float32 range: blocks in float32, their sum in float64, always in the same order."""
    starts = range(0, len(flat), BLOCK)
    return math.fsum(float(np.dot(flat[s : s + BLOCK], flat[s : s + BLOCK])) for s in starts)
