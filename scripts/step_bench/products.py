"""The floor of a step: all its matrix products, in the step's shapes.

Every layer has separate weights and gradients, as in the step, so that they come from memory and not from a cache.
Outputs are never inputs, so that values keep their size and denormal numbers slow no product down.
"""

import numpy as np

HEADS = 4  # attention heads that a thread multiplies at once


def step_products(config, B: int, T: int, kept=np.float32) -> list:
    """Return (part, multiply(cores)) of every product, in the step's order. A layer's attention is one product.

    kept: the dtype of activations that are used only as operands.
    """
    N = B * T
    C = config.n_embd
    padded = config.padded_vocab_size
    widths = ((C, 3 * C), (C, C), (C, 4 * C), (4 * C, C))  # qkv, attproj, fc, fcproj: inputs, outputs
    x = _array(N, 4 * C, dtype=kept)
    y = _array(N, 4 * C, dtype=kept)
    written = _array(N, 4 * C)
    layers = [[(_array(o, i), _array(o, i)) for i, o in widths] for _ in range(config.n_layer)]
    wte = _array(padded, C)
    dwte = _array(padded, C)
    logits = _array(N, padded, dtype=kept)
    forward_heads, backward_heads = _attention(B * config.n_head, T, config.head_size, kept)

    products = []
    for layer in layers:
        for weight, _ in layer:
            o, i = weight.shape
            products.append(("forward, linear", _product(_first(x, N, i), weight.T, _first(written, N, o))))
        products.append(("forward, attention", forward_heads))
    products.append(("classifier", _product(_first(x, N, C), wte.T, _array(N, padded))))
    products += _linear_backward("classifier", logits, _first(x, N, C), wte, dwte, _first(written, N, C))
    for layer in layers:
        for weight, gradient in layer:
            o, i = weight.shape
            shapes = _first(y, N, o), _first(x, N, i), weight, gradient, _first(written, N, i)
            products += _linear_backward("backward, linear", *shapes)
        products.append(("backward, attention", backward_heads))
    return products


def _array(*shape, dtype=np.float32):
    return np.full(shape, 0.01, dtype)


def _first(array, rows: int, columns: int):
    """Return a contiguous (rows, columns) part of a larger buffer."""
    return array.reshape(-1)[: rows * columns].reshape(rows, columns)


def _product(a, b, out):
    """Return multiply(cores), which multiplies a and b with BLAS and its threads, or with our kernels on `cores`."""
    return lambda cores: cores.matmuls((a, b, out, None)) if cores.operand_dtype else np.matmul(a, b, out=out)


def _linear_backward(part, dy, x, weight, dweight, dx):
    return [(part, _product(dy, weight, dx)), (part, _product(dy.T, x, dweight))]


def _attention(heads: int, T: int, head_size: int, kept):
    """Return the two forward and four backward products of all heads. A thread multiplies HEADS heads at once.

    Our step recomputes the scores in backward; the floor does not.
    """
    q, k, v, do = (_array(heads, T, head_size, dtype=kept) for _ in range(4))
    out = _array(heads, T, head_size)
    scores = _array(heads, T, T)

    def run(products):
        def run_heads(cores):
            def some_heads(start, stop):
                for low in range(start, stop, HEADS):
                    for a, b, result in products(slice(low, min(low + HEADS, stop))):
                        cores.matmul(a, b, result)

            cores.for_parts(heads, some_heads)

        return run_heads

    def forward(h):
        return (q[h], _flipped(k[h]), scores[h]), (scores[h], v[h], out[h])

    def backward(h):
        return (
            (do[h], _flipped(v[h]), scores[h]),
            (_flipped(scores[h]), do[h], out[h]),
            (scores[h], k[h], out[h]),
            (_flipped(scores[h]), q[h], out[h]),
        )

    return run(forward), run(backward)


def _flipped(heads):
    return heads.transpose(0, 2, 1)
