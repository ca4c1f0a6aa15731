"""Every kernel's backward against central differences in float64, and forwards against the plain formula."""

import ast
import inspect
import math

import numpy as np
import pytest
from ml_dtypes import bfloat16

from gpt2.errors import UserError
from gpt2.kernels import KERNELS, load_kernels
from gpt2.kernels import numpy as numpy_kernels
from gpt2.kernels.numpy import loops
from gpt2.kernels.numpy.attention import ROWS
from gpt2.kernels.numpy.classifier import COLUMNS
from gpt2.kernels.numpy.classifier import ROWS as ROWS_OF_LOGITS

RANDOM = np.random.default_rng(7)


@pytest.fixture(params=[1, 2], ids="{} threads".format)
def k(request):
    return load_kernels("numpy", request.param)


def random(*shape):
    return RANDOM.standard_normal(shape)


def assert_gradient(function, argument, gradient, samples=40, epsilon=1e-5):
    """gradient of the scalar function() at `argument` (changed in place and put back) against central differences."""
    for index in RANDOM.choice(argument.size, min(samples, argument.size), replace=False):
        at = np.unravel_index(index, argument.shape)
        middle = argument[at]
        argument[at] = middle + epsilon
        above = function()
        argument[at] = middle - epsilon
        below = function()
        argument[at] = middle
        assert gradient[at] == pytest.approx((above - below) / (2 * epsilon), rel=1e-5, abs=1e-7), at


def test_the_set_is_complete(k):
    assert {name for name, value in vars(numpy_kernels).items() if callable(value)} - {
        "Cores",
        "bfloat16_cores",
    } == set(KERNELS)
    for name in KERNELS:
        assert next(iter(inspect.signature(getattr(numpy_kernels, name)).parameters)) == "cores", name
    assert ast.get_docstring(ast.parse(inspect.getsource(numpy_kernels)))


@pytest.mark.parametrize("accumulate", [False, True])
def test_linear(k, accumulate):
    x, w, b, dy, out = random(9, 5), random(7, 5), random(7), random(9, 7), np.empty((9, 7))

    def loss():
        k.linear_forward(out, x, w, b)
        return (out * dy).sum()

    loss()
    np.testing.assert_allclose(out, x @ w.T + b, rtol=1e-12)
    dx, dw, db = np.full_like(x, np.nan), np.full_like(w, 3.0), np.full_like(b, 3.0)
    k.linear_backward(dx, dw, db, dy, x, w, accumulate)
    before = 3.0 if accumulate else 0.0
    assert_gradient(loss, x, dx)
    assert_gradient(loss, w, dw - before)
    assert_gradient(loss, b, db - before)


@pytest.mark.parametrize("accumulate", [False, True])
def test_layernorm(k, accumulate):
    N, C = 11, 6
    x, branch, branch_bias, w, b, dy = random(N, C), random(N, C), random(C), random(C), random(C), random(N, C)
    residual, out, mean, rstd = np.empty((N, C)), np.empty((N, C)), np.empty(N), np.empty(N)

    def loss():
        k.residual_layernorm_forward(residual, out, mean, rstd, x, branch, branch_bias, w, b)
        return (out * dy).sum()

    loss()
    total = x + branch + branch_bias
    normalized = (total - total.mean(1, keepdims=True)) / np.sqrt(total.var(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(residual, total)
    np.testing.assert_allclose(out, normalized * w + b, rtol=1e-10)
    alone = np.empty((N, C))
    k.layernorm_forward(alone, mean, rstd, residual, w, b)
    np.testing.assert_array_equal(alone, out)
    dx, dw, db, dbranch_bias = np.full_like(x, 2.0), np.full_like(w, 3.0), np.full_like(b, 3.0), np.full_like(b, 3.0)
    k.layernorm_backward(dx, dw, db, dbranch_bias, dy, residual, mean, rstd, w, accumulate)
    before = 3.0 if accumulate else 0.0
    assert_gradient(loss, x, dx - 2.0)
    assert_gradient(loss, w, dw - before)
    assert_gradient(loss, b, db - before)
    assert_gradient(loss, branch_bias, dbranch_bias - 2.0 * N)  # dx held twos


@pytest.mark.parametrize("accumulate", [False, True])
def test_linear_gelu_linear(k, accumulate):
    """A layer with GELU, and the layer after it."""
    x, w, b = random(13, 5), random(6, 5), random(6)
    w2, b2, dy = random(7, 6), random(7), random(13, 7)
    hidden, saved, out = np.empty((13, 6)), np.empty((13, 6)), np.empty((13, 7))
    b[0], b[1] = 40.0, -40.0  # far out, where the exponential overflows in float32

    def loss():
        k.linear_gelu_forward(hidden, saved, x, w, b)
        k.linear_forward(out, hidden, w2, b2)
        return (out * dy).sum()

    loss()
    y = x @ w.T + b
    np.testing.assert_allclose(
        hidden, 0.5 * y * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3))), atol=1e-12
    )
    dpre, dw2 = np.full_like(hidden, np.nan), np.full_like(w2, 3.0)
    k.gelu_linear_backward(dpre, dw2, dy, hidden, saved, w2, accumulate)
    before = 3.0 if accumulate else 0.0
    assert_gradient(loss, x, dpre @ w)
    assert_gradient(loss, b, dpre.sum(0))
    assert_gradient(loss, w2, dw2 - before)


def test_gelu_far_out_in_float32(k):
    x = np.array([[-1e4, -20.0, 0.0, 20.0, 1e4]], np.float32)
    out, saved = np.empty((1, 5), np.float32), np.empty((1, 5), np.float32)
    k.linear_gelu_forward(out, saved, x, np.eye(5, dtype=np.float32), np.zeros(5, np.float32))
    np.testing.assert_allclose(out, [[0, 0, 0, 20, 1e4]], atol=1e-6)
    np.testing.assert_allclose(saved, [[0, 0, 0.5, 1, 1]], atol=1e-6)


def plain_attention(qkv, heads):
    """(B, T, C) by the formula, without blocks."""
    B, T, width = qkv.shape
    q, k, v = qkv.reshape(B, T, 3, heads, -1).transpose(2, 0, 3, 1, 4)
    scores = q @ k.transpose(0, 1, 3, 2) / math.sqrt(q.shape[-1])
    scores = np.where(np.tri(T, dtype=bool), scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return (p @ v).transpose(0, 2, 1, 3).reshape(B, T, width // 3)


@pytest.mark.parametrize(("B", "T", "heads", "head_size"), [(2, 5, 3, 4), (1, 1, 2, 2), (2, 2 * ROWS + 3, 2, 4)])
def test_attention(k, B, T, heads, head_size):
    C = heads * head_size
    qkv, dout = random(B, T, 3 * C), random(B, T, C)
    out, logsumexp = np.empty((B, T, C)), np.empty((B, heads, T))

    def loss():
        k.attention_forward(out, logsumexp, qkv, heads)
        return (out * dout).sum()

    loss()
    np.testing.assert_allclose(out, plain_attention(qkv, heads), rtol=1e-9, atol=1e-12)
    dqkv = np.full_like(qkv, np.nan)
    k.attention_backward(dqkv, dout, qkv, out, logsumexp, heads)
    assert_gradient(loss, qkv, dqkv)


def test_attention_of_huge_scores(k):
    """Scores some hundreds above the diagonal's, where the quick shift overflows, in one head of two."""
    T = ROWS + 5
    qkv = random(1, T, 3 * 8)
    qkv[:, :, [0, 1, 2, 3, 8, 9, 10, 11]] *= 20
    dout = random(1, T, 8)
    results = []
    for dtype in (np.float32, np.float64):
        out, logsumexp, dqkv = (np.empty(s, dtype) for s in ((1, T, 8), (1, 2, T), (1, T, 24)))
        k.attention_forward(out, logsumexp, qkv.astype(dtype), 2)
        k.attention_backward(dqkv, dout.astype(dtype), qkv.astype(dtype), out, logsumexp, 2)
        assert logsumexp.max() > 100
        results.append((out, dqkv))
    np.testing.assert_allclose(results[1][0], plain_attention(qkv, 2), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-2, atol=1e-2)
    np.testing.assert_allclose(results[0][1], results[1][1], rtol=1e-2, atol=0.05)


def test_attention_keeps_nan_to_the_queries_that_see_it(k):
    qkv = RANDOM.standard_normal((1, ROWS + 40, 3 * 8), dtype=np.float32)
    out, logsumexp = np.empty((1, ROWS + 40, 8), np.float32), np.empty((1, 2, ROWS + 40), np.float32)
    qkv[0, 30, 8] = np.nan  # in a key of the first head
    k.attention_forward(out, logsumexp, qkv, 2)
    assert np.isnan(out[0, 30:, :4]).all()
    assert np.isfinite(out[0, :30]).all()
    assert np.isfinite(out[0, :, 4:]).all()


def test_embedding(k):
    B, T, C, V = 3, 4, 5, 8
    tokens = RANDOM.integers(V, size=(B, T)).astype(np.int32)
    tokens[0, :2] = 6  # a token that repeats
    wte, wpe, dout, out = random(V, C), random(T + 2, C), random(B, T, C), np.empty((B, T, C))

    def loss():
        k.embedding_forward(out, tokens, wte, wpe)
        return (out * dout).sum()

    loss()
    np.testing.assert_allclose(out, wte[tokens] + wpe[:T])
    dwte, dwpe = np.full_like(wte, 2.0), np.full_like(wpe, 9.0)
    k.embedding_backward(dwte, dwpe, dout, tokens, False)
    assert_gradient(loss, wte, dwte - 2.0)
    assert_gradient(loss, wpe, dwpe)
    once = dwpe.copy()
    k.embedding_backward(dwte, dwpe, dout, tokens, True)
    np.testing.assert_allclose(dwpe, 2 * once)


def test_add_and_column_sums(k):
    first, second, bias, out = random(4, 5), random(4, 5), random(5), np.empty((4, 5))
    total = first + second
    k.add(out, first, second, bias)
    np.testing.assert_allclose(out, total + bias, rtol=1e-15)
    sums = np.full(5, 3.0)
    for times in (0, 1):  # written, then added to
        k.column_sums(sums, first, times > 0)
        np.testing.assert_allclose(sums, (1 + times) * first.sum(0), rtol=1e-14)
    k.add(out, first, second)
    k.add(first, first, second)
    np.testing.assert_array_equal(out, total)
    np.testing.assert_array_equal(first, total)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("N", "V", "padded"), [(5, 7, 10), (ROWS_OF_LOGITS + 3, COLUMNS + 9, COLUMNS + 12)])
def test_classifier(k, N, V, padded, accumulate):
    """Rows and columns above and not a multiple of the kernel's blocks; three pad columns."""
    C, scale = 4, 0.25
    x, wte, targets = random(N, C), random(padded, C), RANDOM.integers(V, size=N)
    losses, exponentials, row_scale = np.empty(N), np.full((N, padded), np.nan), np.empty(N)

    def loss():
        k.classifier_forward(losses, None, None, x, wte, targets, V, 0.0)
        return scale * losses.sum()

    loss()
    logits = x @ wte[:V].T
    expected = np.log(np.exp(logits).sum(1)) - logits[np.arange(N), targets]
    np.testing.assert_allclose(losses, expected, rtol=1e-10)
    k.classifier_forward(losses, exponentials, row_scale, x, wte, targets, V, scale)
    np.testing.assert_allclose(losses, expected, rtol=1e-10)
    dx, dwte = np.full_like(x, np.nan), np.full_like(wte, 3.0)
    k.classifier_backward(dx, dwte, exponentials, row_scale, x, wte, accumulate)
    before = 3.0 if accumulate else 0.0
    np.testing.assert_array_equal(dwte[V:], before)
    assert_gradient(loss, x, dx)
    assert_gradient(loss, wte, dwte - before)


def test_classifier_of_huge_logits(k):
    """Logits some hundreds above the target's, where the quick shift overflows in all rows but one: as in float64."""
    N, C, V = 6, 8, 40
    x, wte, targets = 15 * random(N, C), 3 * random(V, C), RANDOM.integers(V, size=N)
    x[0] /= 100
    results = []
    for dtype in (np.float32, np.float64):
        losses, exponentials, row_scale = np.empty(N, dtype), np.empty((N, V), dtype), np.empty(N, dtype)
        k.classifier_forward(losses, exponentials, row_scale, x.astype(dtype), wte.astype(dtype), targets, V, 0.5)
        results.append((losses, exponentials * row_scale[:, None]))
    logits = x @ wte.T
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    assert results[1][0].max() > 100
    np.testing.assert_allclose(results[1][1], 0.5 * (p - np.eye(V)[targets]), atol=1e-12)
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(results[0][1], results[1][1], atol=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_losses_over_a_large_vocabulary(threads, keeps, dtype):
    """One likely token among GPT-2's 50257, near the first of them, against float64: float32 loses no small terms.

    The operands are bfloat16 numbers, so that both dtypes multiply the same.
    """
    N, C, V, scale = 40, 16, 50257, 0.5
    x, wte = (values.astype(bfloat16).astype(np.float32) for values in (random(N, C), random(V, C)))
    x[:, 0], wte[:, 0], wte[7, 0] = 1, -12, 0
    targets = np.where(np.arange(N) % 2, 7, RANDOM.integers(V, size=N))
    kept = (np.empty((N, V), np.float32), np.empty(N, np.float32)) if keeps else (None, None)
    losses = np.empty(N, np.float32)
    load_kernels("numpy", threads, dtype=dtype).classifier_forward(losses, *kept, x, wte, targets, V, scale)
    logits = x.astype(np.float64) @ wte.T.astype(np.float64)
    shifted = logits - logits[np.arange(N), targets][:, None]
    np.testing.assert_allclose(losses, np.log(np.exp(shifted).sum(axis=1)), rtol=0, atol=5e-6)
    if keeps:
        np.testing.assert_allclose(kept[1], scale / np.exp(shifted).sum(axis=1), rtol=5e-6)


LONG = {  # what float32 adds one by one with errors of 1e-4
    "equal": lambda count: np.full(count, 0.1, np.float32),
    "one large": lambda count: np.where(np.arange(count) == 3, 1, 3e-8).astype(np.float32),
}


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_gradients_that_are_sums_over_many_rows(threads, name):
    """Of biases, LayerNorm and the embedding of a frequent token, against float64."""
    N, C, k = 16384, 24, load_kernels("numpy", threads)
    dy, ones, weight = np.repeat(LONG[name](N)[:, None], C, axis=1), np.ones(C, np.float32), np.eye(C, dtype=np.float32)
    inputs, mean, rstd = np.full((N, C), 2, np.float32), np.ones(N, np.float32), np.ones(N, np.float32)
    dweight, dbias, of_branch, of_linear = np.empty((4, C), np.float32)
    dwte, dinputs = np.zeros((1, C), np.float32), dy.copy()
    k.layernorm_backward(dinputs, dweight, dbias, of_branch, np.zeros_like(dy), inputs, mean, rstd, ones, False)
    k.layernorm_backward(np.zeros_like(dy), dweight, dbias, None, dy, inputs, mean, rstd, ones, False)
    k.linear_backward(np.empty_like(dy), np.empty((C, C), np.float32), of_linear, dy, inputs, weight, False)
    k.embedding_backward(dwte, None, dy.reshape(16, -1, C), np.zeros((16, N // 16), np.int32), False)
    for found in (dweight, dbias, of_branch, of_linear, dwte[0]):
        np.testing.assert_allclose(found, dy.sum(axis=0, dtype=np.float64), rtol=1e-5)


def test_sum_of_squares(k):
    x = RANDOM.standard_normal(300_001, dtype=np.float32)
    assert k.sum_of_squares(x) == pytest.approx(float((x.astype(np.float64) ** 2).sum()), rel=1e-6)
    assert k.sum_of_squares(x[:0]) == 0.0
    x = np.full(1 << 20, 1e-4, np.float32)
    x[:: 1 << 19] = 1
    assert k.sum_of_squares(x) == pytest.approx(float((x.astype(np.float64) ** 2).sum()), rel=1e-6)


@pytest.mark.parametrize("place", [0, 2])
def test_an_error_in_any_threads_part_is_raised(place):
    cores = numpy_kernels.Cores(3)

    def work(start, stop):
        if start == place:
            raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        cores.for_parts(3, work)
    covered = []
    cores.for_parts(10, lambda start, stop: covered.extend(range(start, stop)))
    assert sorted(covered) == list(range(10)), "the threads go on working after an error"


def test_kernels_that_numba_may_not_compile(monkeypatch):
    """As with NUMBA_DISABLE_JIT=1."""
    monkeypatch.setattr("numba.config.DISABLE_JIT", 1)
    with pytest.raises(UserError, match="NUMBA_DISABLE_JIT is set, expected unset"):
        load_kernels("numpy", 1)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exponential(dtype):
    x = np.linspace(-87.3, 80, 100_001, dtype=dtype)[None]
    out, sums = np.empty_like(x), np.zeros(1, dtype)
    loops.add_exponentials(out, 0, sums, x, np.zeros(1, dtype))
    np.testing.assert_allclose(out, np.exp(x.astype(np.float64)), rtol=np.finfo(dtype).eps)
    assert sums[0] == pytest.approx(out.sum(dtype=np.float64), rel=1e-5)
    far_out = np.array([[-np.inf, -1e30, -120.0, 1e30, np.inf, np.nan]], dtype)
    out = np.full((1, 8), 7.0, dtype)
    loops.add_exponentials(out, 1, sums, far_out, np.zeros(1, dtype))
    np.testing.assert_allclose(out, [[7, 0, 0, 0, np.inf, np.inf, np.nan, 7]], atol=1e-50)
