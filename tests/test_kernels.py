"""Every kernel's backward against central differences in float64, and forwards against the plain formula."""

import ast
import inspect
import math

import numpy as np
import pytest

from gpt2 import numpy_kernels
from gpt2.kernels import KERNELS, load_kernels
from gpt2.numpy_kernels.attention import ROWS

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
    assert set(numpy_kernels.__all__) - {"Cores"} == set(KERNELS)
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
    x, branch, w, b, dy = random(N, C), random(N, C), random(C), random(C), random(N, C)
    residual, out, mean, rstd = np.empty((N, C)), np.empty((N, C)), np.empty(N), np.empty(N)

    def loss():
        k.residual_layernorm_forward(residual, out, mean, rstd, x, branch, w, b)
        return (out * dy).sum()

    loss()
    total = x + branch
    normalized = (total - total.mean(1, keepdims=True)) / np.sqrt(total.var(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(residual, total)
    np.testing.assert_allclose(out, normalized * w + b, rtol=1e-10)
    alone = np.empty((N, C))
    k.layernorm_forward(alone, mean, rstd, residual, w, b)
    np.testing.assert_array_equal(alone, out)
    dx, dw, db = np.full_like(x, 2.0), np.full_like(w, 3.0), np.full_like(b, 3.0)
    k.layernorm_backward(dx, dw, db, dy, residual, mean, rstd, w, accumulate)
    before = 3.0 if accumulate else 0.0
    assert_gradient(loss, x, dx - 2.0)
    assert_gradient(loss, w, dw - before)
    assert_gradient(loss, b, db - before)


def test_gelu(k):
    x, dy, out = 2 * random(13, 6), random(13, 6), np.empty((13, 6))

    def loss():
        k.gelu_forward(out, x)
        return (out * dy).sum()

    loss()
    np.testing.assert_allclose(out, 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))), rtol=1e-12)
    dx = dy.copy()
    k.gelu_backward(dx, dx, x)  # in place, as the model does
    assert_gradient(loss, x, dx)


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


def test_attention_does_not_overflow(k):
    qkv = (60 * random(1, 9, 3 * 4)).astype(np.float32)
    out, logsumexp = np.empty((1, 9, 4), np.float32), np.empty((1, 1, 9), np.float32)
    k.attention_forward(out, logsumexp, qkv, 1)
    np.testing.assert_allclose(out, plain_attention(qkv.astype(np.float64), 1), rtol=1e-3, atol=1e-3)


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


def test_classifier(k):
    """Rows above and not a multiple of the kernel's block; three pad columns."""
    N, C, V, padded = 131, 4, 7, 10
    x, wte, targets = random(N, C), random(padded, C), RANDOM.integers(V, size=N)
    losses, dlogits, scale = np.empty(N), np.full((N, padded), np.nan), 0.25

    def loss():
        k.classifier(losses, None, x, wte, targets, V, 0.0)
        return scale * losses.sum()

    loss()
    logits = x @ wte[:V].T
    expected = np.log(np.exp(logits).sum(1)) - logits[np.arange(N), targets]
    np.testing.assert_allclose(losses, expected, rtol=1e-10)
    k.classifier(losses, dlogits, x, wte, targets, V, scale)
    np.testing.assert_allclose(losses, expected, rtol=1e-10)
    assert not dlogits[:, V:].any()
    assert_gradient(loss, x, dlogits @ wte)
    assert_gradient(loss, wte, dlogits.T @ x)


@pytest.mark.parametrize("gradient_scale", [1.0, 0.3])
def test_adamw_is_the_textbook_one(k, gradient_scale):
    """Against the formula with scaled moments and bias corrections, over several steps and several blocks."""
    size, lr, beta1, beta2, eps, weight_decay = 200_003, 1e-2, 0.9, 0.95, 1e-8, 0.1
    p = random(size)
    ours, m, v = p.copy(), np.zeros(size), np.zeros(size)
    first, second = np.zeros(size), np.zeros(size)
    for step in range(1, 6):
        g = random(size)
        k.adamw(ours, g, m, v, step, lr, beta1, beta2, eps, weight_decay, gradient_scale)
        g = g * gradient_scale
        first = beta1 * first + (1 - beta1) * g
        second = beta2 * second + (1 - beta2) * g * g
        update = first / (1 - beta1**step) / (np.sqrt(second / (1 - beta2**step)) + eps)
        p = p - lr * (update + weight_decay * p)
    np.testing.assert_allclose(ours, p, rtol=1e-10, atol=1e-12)


def test_sum_of_squares(k):
    x = RANDOM.standard_normal(300_001, dtype=np.float32)
    assert k.sum_of_squares(x) == pytest.approx(float((x.astype(np.float64) ** 2).sum()), rel=1e-6)
    assert k.sum_of_squares(x[:0]) == 0.0
