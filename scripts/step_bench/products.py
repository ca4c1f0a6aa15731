"""The floor of a step: all its matrix products, with their shapes, each operand in memory of its own size and age.

Weights and their gradients are separate for every layer, as in the step, so that they come from memory as there.
Outputs are never inputs: values stay where they began, and no product slows down over denormal numbers.
"""

import numpy as np


def step_products(config, B: int, T: int) -> list:
    """(part, multiply(cores)) of every product, or of a layer's attention head by head, in the step's order."""
    N, C, padded = B * T, config.n_embd, config.padded_vocab_size
    widths = ((C, 3 * C), (C, C), (C, 4 * C), (4 * C, C))  # qkv, attproj, fc, fcproj: inputs, outputs
    x, y, written = _array(N, 4 * C), _array(N, 4 * C), _array(N, 4 * C)
    layers = [[(_array(o, i), _array(o, i)) for i, o in widths] for _ in range(config.n_layer)]
    wte, dwte, logits = _array(padded, C), _array(padded, C), _array(N, padded)
    forward_heads, backward_heads = _attention(B * config.n_head, T, config.head_size)

    products = []
    for layer in layers:
        for weight, _ in layer:
            o, i = weight.shape
            products.append(("forward, linear", _product(_first(x, N, i), weight.T, _first(written, N, o))))
        products.append(("forward, attention", forward_heads))
    products.append(("classifier", _product(_first(x, N, C), wte.T, np.empty_like(logits))))
    products += _linear_backward("classifier", logits, _first(x, N, C), wte, dwte, _first(written, N, C))
    for layer in layers:
        for weight, gradient in layer:
            o, i = weight.shape
            shapes = _first(y, N, o), _first(x, N, i), weight, gradient, _first(written, N, i)
            products += _linear_backward("backward, linear", *shapes)
        products.append(("backward, attention", backward_heads))
    return products


def _array(*shape):
    return np.full(shape, 0.01, np.float32)


def _first(array, rows: int, columns: int):
    """A contiguous (rows, columns) part of a larger buffer."""
    return array.reshape(-1)[: rows * columns].reshape(rows, columns)


def _product(a, b, out):
    return lambda cores: np.matmul(a, b, out=out)


def _linear_backward(part, dy, x, weight, dweight, dx):
    return [(part, _product(dy, weight, dx)), (part, _product(dy.T, x, dweight))]


def _attention(heads: int, T: int, head_size: int):
    """Forward's two and backward's four products of all heads, a thread a head, each head's while it is in cache.

    That a backward may make the scores again, as ours does, is not in the floor.
    """
    q, k, v, do, out = (_array(heads, T, head_size) for _ in range(5))
    scores = _array(heads, T, T)

    def run(products):
        def one_head(h, _):
            for a, b, result in products(h):
                np.matmul(a, b, out=result)

        return lambda cores: cores.for_blocks(heads, 1, one_head)

    def forward(h):
        return (q[h], k[h].T, scores[h]), (scores[h], v[h], out[h])

    def backward(h):
        return (
            (do[h], v[h].T, scores[h]),
            (scores[h].T, do[h], out[h]),
            (scores[h], k[h], out[h]),
            (scores[h].T, q[h], out[h]),
        )

    return run(forward), run(backward)
