"""The floor of a step: all its matrix products, with their shapes, each operand in memory of its own size and age.

Weights and their gradients are separate for every layer, as in the step, so that they come from memory as there.
Outputs are never inputs: values stay where they began, and no product slows down over denormal numbers.
"""

import numpy as np

HEADS = 4  # attention's, multiplied at once


def step_products(config, B: int, T: int, kept=np.float32) -> list:
    """(part, multiply(cores)) of every product, or of a layer's attention head by head, in the step's order.

    kept: the dtype of activations that are only ever operands.
    """
    N, C, padded = B * T, config.n_embd, config.padded_vocab_size
    widths = ((C, 3 * C), (C, C), (C, 4 * C), (4 * C, C))  # qkv, attproj, fc, fcproj: inputs, outputs
    x, y, written = _array(N, 4 * C, dtype=kept), _array(N, 4 * C, dtype=kept), _array(N, 4 * C)
    layers = [[(_array(o, i), _array(o, i)) for i, o in widths] for _ in range(config.n_layer)]
    wte, dwte, logits = _array(padded, C), _array(padded, C), _array(N, padded, dtype=kept)
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


def least_flops(config, B: int, T: int) -> int:
    """Floating point operations of the products that no step can do without: not those with masked keys or pad rows."""
    weights = 12 * config.n_layer * config.n_embd**2 + config.vocab_size * config.n_embd
    seen = T * (T + 1) // 2  # pairs of query and key
    return 6 * B * T * weights + 12 * B * config.n_layer * config.n_embd * seen


def _array(*shape, dtype=np.float32):
    return np.full(shape, 0.01, dtype)


def _first(array, rows: int, columns: int):
    """A contiguous (rows, columns) part of a larger buffer."""
    return array.reshape(-1)[: rows * columns].reshape(rows, columns)


def _product(a, b, out):
    """By BLAS' own threads, or, where it does not make the products, by those that do."""
    return lambda cores: np.matmul(a, b, out=out) if is_blas(cores) else cores.matmuls((a, b, out, None))


def is_blas(cores) -> bool:
    return cores.operand_dtype is None


def _linear_backward(part, dy, x, weight, dweight, dx):
    return [(part, _product(dy, weight, dx)), (part, _product(dy.T, x, dweight))]


def _attention(heads: int, T: int, head_size: int, kept):
    """Forward's two and backward's four products of all heads, on each thread a few at once, which its cache holds.

    That a backward may make the scores again, as ours does, is not in the floor.
    """
    q, k, v, do = (_array(heads, T, head_size, dtype=kept) for _ in range(4))
    out, scores = _array(heads, T, head_size), _array(heads, T, T)

    def run(products):
        def run_heads(cores):
            def some_heads(start, stop):
                for a, b, result in products(slice(start, stop)):
                    cores.matmul(a, b, result)

            cores.for_blocks(heads, HEADS, some_heads)

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
