"""The kernels' loops over elements, compiled by numba: each reads and writes memory once. BLAS computes products.

Arrays are C-contiguous and of one dtype, float32 (or float64, in gradient checks). bfloat16 arrays are passed as their
`bits`. The loops release the interpreter lock and run on the caller's thread. Constants take the arrays' dtype: a bare
0.5 would be float64, and make all results float64.
"""

import math

import numba
import numpy as np
from ml_dtypes import bfloat16
from numba.extending import overload, register_jitable

from gpt2.kernels.numpy.compiling import compiled, compiled_sums

SQUARES = 1024  # elements whose squares sum_of_squares adds in their own dtype


def _exp(x):
    """Compute e**x: in float32 within 1 ulp, 0 below -88, infinity above 88.3, NaN for NaN."""


# No fastmath from the caller: it would optimize away the rounding below.
@overload(_exp, jit_options={"error_model": "numpy", "fastmath": False})
def _exp_of_dtype(x):
    if x is not numba.float32:
        return lambda x: math.exp(x)
    f = np.float32

    def exp32(x):
        """Compute 2^n e^r with n = round(x / ln 2), |r| <= ln(2) / 2, by the polynomial and split ln 2 of Cephes' expf.

        Adding `shift` rounds x / ln 2 and leaves n + 127, the bits of 2^n's exponent, at the lower end of the sum.
        """
        shift = f(1.5 * 2**23 + 127)
        x = f(-88.0) if x < f(-88.0) else x
        x = f(89.0) if x > f(89.0) else x
        shifted = np.float32(x * f(1.44269504) + shift)
        n = shifted - shift
        r = x - n * f(0.693359375) + n * f(2.12194440e-4)
        p = ((f(1.9875691500e-4) * r + f(1.3981999507e-3)) * r + f(8.3334519073e-3)) * r + f(4.1665795894e-2)
        p = ((p * r + f(1.6666665459e-1)) * r + f(5.0000001201e-1)) * r * r + r + f(1.0)
        return p * np.int32(shifted.view(np.int32) << np.int32(23)).view(np.float32)

    return exp32


def bits(array):
    """Return the array as these loops take it: for bfloat16 its bits, uint16."""
    return array.view(np.uint16) if array.dtype == bfloat16 else array


@register_jitable(error_model="numpy", fastmath=False)
def rounded(value):
    """Return the bits of the bfloat16 nearest to a float32; ties go to even."""
    word = np.float32(value).view(np.uint32)
    if (word & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):  # NaN: the sum below could overflow its bits
        return np.uint16((word >> np.uint32(16)) | np.uint32(64))
    return np.uint16((word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


def _as_kept(array, value):
    """Return the value as `array` stores it: unchanged, or rounded for the bits of bfloat16."""


@overload(_as_kept, inline="always")
def _as_kept_of_dtype(array, value):
    if array.dtype is numba.uint16:
        return lambda array, value: rounded(value)
    return lambda array, value: value


def number(value):
    """Return a stored number: unchanged, or float32 from the bits of bfloat16."""


@overload(number, inline="always")
def _number_of_dtype(value):
    if value is not numba.uint16:
        return lambda value: value
    return lambda value: np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)


@compiled
def keep(out, values, columns):
    """Copy values to out, rounded if `out` is bfloat16, in these columns of both (N, width)."""
    for n in range(len(out)):
        row_out = out[n, columns]
        row = values[n, columns]
        for c in range(len(row)):
            row_out[c] = _as_kept(row_out, row[c])


@compiled
def round_off(values):
    """Round flat float32 values to the nearest bfloat16, in place."""
    for i in range(len(values)):
        values[i] = number(rounded(values[i]))


@compiled
def add_bias(x, bias, columns):
    """Add the bias (width,) to x (N, width), in these columns of both."""
    for n in range(len(x)):
        row_x = x[n, columns]
        row_bias = bias[columns]
        for c in range(len(row_x)):
            row_x[c] += row_bias[c]


@compiled
def multiply_by(x, factor, columns):
    """Multiply x by factor, in these columns of both (N, width)."""
    for n in range(len(x)):
        row_x = x[n, columns]
        row_factor = factor[n, columns]
        for c in range(len(row_x)):
            row_x[c] *= number(row_factor[c])


@register_jitable(error_model="numpy", fastmath=False)
def adamw_element(p, m, v, gradient, beta1, beta2, step_size, eps, keep):
    """Compute m = b1 m + g;  v = b2 v + g^2;  p = keep p - step_size m / (sqrt(v) + eps).  Return p, m, v."""
    m = m * beta1 + gradient
    v = v * beta2 + gradient * gradient
    return p * keep - step_size * (m / (math.sqrt(v) + eps)), m, v


@compiled
def adamw(p, g, m, v, beta1, beta2, step_size, eps, keep, gradient_scale):
    """Update p, m and v, flat arrays of one length, with the gradients g * gradient_scale."""
    for i in range(len(p)):
        gradient = g[i] * gradient_scale
        p[i], m[i], v[i] = adamw_element(p[i], m[i], v[i], gradient, beta1, beta2, step_size, eps, keep)


@compiled_sums
def sum_of_squares(flat):
    """Add in float64 sums of SQUARES squares in the array's dtype: exact enough, and as fast as memory."""
    total = 0.0
    for start in range(0, len(flat), SQUARES):
        block = flat[start : start + SQUARES]
        squares = flat.dtype.type(0.0)
        for i in range(len(block)):
            squares += block[i] * block[i]
        total += squares
    return total


@compiled
def bias_gelu_and_slope(y, x, bias, columns):
    """Compute y = gelu(x + bias), x = its slope, in these columns of y, x (N, width) and bias (width,)."""
    real = x.dtype.type
    one = real(1.0)
    three = real(3.0)
    linear = real(-2.0 * math.sqrt(2.0 / math.pi))
    cubic = real(-2.0 * math.sqrt(2.0 / math.pi) * 0.044715)
    for n in range(len(x)):  # with a row as its own array, LLVM sees that no index is negative
        row_y = y[n, columns]
        row_x = x[n, columns]
        row_bias = bias[columns]
        for c in range(len(row_x)):
            z = row_x[c] + row_bias[c]
            square = cubic * z * z
            h = one + _exp(z * (linear + square))
            result = z / h
            row_y[c] = _as_kept(row_y, result)
            row_x[c] = (one - (z - result) * (linear + three * square)) / h


@compiled_sums
def _normalize_row(out, mean, rstd, x, weight, bias, epsilon, n):
    C = x.shape[1]
    real = x.dtype.type
    total = real(0.0)
    squares = real(0.0)
    for c in range(C):
        total += x[n, c]
    mean[n] = total / real(C)
    for c in range(C):
        squares += (x[n, c] - mean[n]) * (x[n, c] - mean[n])
    rstd[n] = real(1.0) / math.sqrt(squares / real(C) + real(epsilon))
    for c in range(C):
        out[n, c] = _as_kept(out, (x[n, c] - mean[n]) * rstd[n] * weight[c] + bias[c])


@compiled
def layernorm(out, mean, rstd, x, weight, bias, epsilon, start, stop):
    """Compute rows [start, stop) of out = LayerNorm(x), both (N, C), and of mean, rstd (N,); weight, bias (C,)."""
    for n in range(start, stop):
        _normalize_row(out, mean, rstd, x, weight, bias, epsilon, n)


@compiled
def residual_layernorm(residual, out, mean, rstd, x, branch, branch_bias, weight, bias, epsilon, start, stop):
    """Compute residual = x + (branch + branch_bias), and its LayerNorm."""
    for n in range(start, stop):
        for c in range(x.shape[1]):
            residual[n, c] = x[n, c] + (branch[n, c] + branch_bias[c])
        _normalize_row(out, mean, rstd, residual, weight, bias, epsilon, n)


@compiled_sums
def layernorm_backward(dx, dweight, dbias, column_sums, dy, x, mean, rstd, weight, start, stop):
    """Add the gradients of rows [start, stop) to dx, dweight, dbias; column_sums (C,) += the column sums of the new dx.

    dx, dy, x (N, C); mean, rstd (N,); dweight, dbias (C,).
    """
    C = x.shape[1]
    real = x.dtype.type
    for n in range(start, stop):
        g_sum = real(0.0)
        gn_sum = real(0.0)
        for c in range(C):
            normalized = (x[n, c] - mean[n]) * rstd[n]
            dweight[c] += dy[n, c] * normalized
            dbias[c] += dy[n, c]
            g_sum += dy[n, c] * weight[c]
            gn_sum += dy[n, c] * weight[c] * normalized
        g_mean = g_sum / real(C)
        gn_mean = gn_sum / real(C)
        for c in range(C):
            normalized = (x[n, c] - mean[n]) * rstd[n]
            dx[n, c] += rstd[n] * (dy[n, c] * weight[c] - g_mean - normalized * gn_mean)
            column_sums[c] += dx[n, c]


@compiled(fastmath={"nnan", "nsz"})
def _largest(row):
    """Return the largest number of a row; any number if there is a NaN."""
    largest = row[0]
    for value in row:
        largest = value if value > largest else largest
    return largest


@compiled_sums
def causal_softmax(scores, logsumexp, first_query, scale):
    """Compute scores (heads, queries, keys) = softmax(scale * scores), 0 where a key comes after its query.

    logsumexp (heads, T) is computed from scale * scores. The first query has position first_query in the sequence.
    """
    heads, queries, keys = scores.shape
    real = scores.dtype.type
    for h in range(heads):
        for query in range(queries):
            seen = first_query + query + 1
            p = scores[h, query]
            total = real(0.0)
            largest = _largest(p[:seen])
            for key in range(seen):
                p[key] = _exp(scale * (p[key] - largest))
                total += p[key]
            for key in range(seen):
                p[key] /= total
            for key in range(seen, keys):
                p[key] = real(0.0)
            logsumexp[h, first_query + query] = scale * largest + math.log(total)


@compiled
def causal_softmax_backward(scores, dp, logsumexp, out_dots, first_query, scale):
    """Set scores = p = softmax(scale * scores), from logsumexp; dp = the scores' gradient, scale * p * (dp - out_dots).

    scores, dp (heads, queries, keys); logsumexp, out_dots (heads, T); out_dots = rowsum(p dp) = rowsum(dO O).
    """
    heads, queries, keys = scores.shape
    real = scores.dtype.type
    for h in range(heads):
        for query in range(queries):
            p = scores[h, query]
            dscores = dp[h, query]
            row = first_query + query
            for key in range(row + 1):
                p[key] = _exp(scale * p[key] - logsumexp[h, row])
                dscores[key] = scale * p[key] * (dscores[key] - out_dots[h, row])
            for key in range(row + 1, keys):
                p[key] = dscores[key] = real(0.0)


@compiled_sums
def add_exponentials(out, first_column, row_sums, logits, shift):
    """Add to row_sums (N,) the row sums of exp(logits - shift[:, None]); out[:, first_column:] = the exponentials.

    logits (N, columns), shift (N,). out is None if only the sums are wanted. It must not overlap the logits, or LLVM
    does not vectorize the loop. Each sum starts at zero, because a long row's total would round small terms away.
    """
    N, width = logits.shape
    for n in range(N):
        row = logits[n]
        total = row_sums.dtype.type(0.0)
        if out is None:  # decided when compiled; one loop for both would be a tenth slower
            for c in range(width):
                total += _exp(row[c] - shift[n])
        else:
            row_out = out[n, first_column : first_column + width]
            for c in range(width):
                exponential = _exp(row[c] - shift[n])
                row_out[c] = _as_kept(row_out, exponential)
                total += exponential
        row_sums[n] += total
