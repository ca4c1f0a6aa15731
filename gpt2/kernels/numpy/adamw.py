"""AdamW (Loshchilov and Hutter 2019) on a flat range, and the sum of squares that clipping needs.

The moments are kept unscaled: m = sum b1^(t-i) g_i and v = sum b2^(t-i) g_i^2. The usual factors (1-b1), (1-b2) and
the bias corrections are constants of a step, and go into the step size and epsilon:

    p -= lr (mhat / (sqrt(vhat) + eps) + weight_decay p),   mhat = m (1-b1)/(1-b1^t),   vhat = v (1-b2)/(1-b2^t)
"""

import math

from gpt2.kernels.numpy import factors, loops


def adamw(
    cores, parameters, gradients, m, v, decaying, step, lr, beta1, beta2, eps, weight_decay, gradient_scale,
    master=None, first=0, rounding_seed=None,
):  # fmt: skip
    """Update parameters, m and v, flat arrays of one length, with gradients * gradient_scale. `step` counts from 1.

    decaying: the ranges [(start, stop), ...] that weight decay applies to, in order. gradients: flat, or
    factors.FactoredGradients, of which no matrix decays in part.
    master, first, rounding_seed: for bfloat16 parameters, which this set does not have.
    """
    assert master is None, "the numpy kernels have no bfloat16 parameters"
    root = math.sqrt((1.0 - beta2) / (1.0 - beta2**step))
    step_size = lr * (1.0 - beta1) / (1.0 - beta1**step) / root
    ranges = _ranges(decaying, len(parameters), 1.0 - lr * weight_decay)
    real = parameters.dtype.type

    is_factored = isinstance(gradients, factors.FactoredGradients)
    parts = list(gradients.parts()) if is_factored else [(0, len(parameters), gradients)]

    def part(start, stop):
        for low, high, keep in ranges:
            numbers = [real(number) for number in (beta1, beta2, step_size, eps / root, keep, gradient_scale)]
            for begin, end, gradient in parts:
                some = slice(max(low, start, begin), min(high, stop, end))
                if some.start < some.stop and isinstance(gradient, tuple):
                    _adamw_of_matrix(parameters, *gradient, m, v, begin, some, numbers)
                elif some.start < some.stop:
                    flat = gradient[some.start - begin : some.stop - begin]
                    loops.adamw(parameters[some], flat, m[some], v[some], *numbers)

    cores.for_parts(len(parameters), part)


def _adamw_of_matrix(parameters, p, q, m, v, begin, some, numbers) -> None:
    """Update the rows that start in the slice `some` of the flat arrays, of a matrix that starts at `begin`."""
    columns = q.shape[1]
    rows = slice(-(-(some.start - begin) // columns), -(-(some.stop - begin) // columns))
    end = begin + len(p) * columns
    matrix, matrix_m, matrix_v = (flat[begin:end].reshape(-1, columns)[rows] for flat in (parameters, m, v))
    _, adamw_of_product = factors.loops_of(len(q))
    adamw_of_product(matrix, p[rows], q, matrix_m, matrix_v, *numbers)


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
