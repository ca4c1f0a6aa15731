"""Token plus position embedding."""

import numpy as np


def embedding_forward(cores, out, tokens, wte, wpe):
    """out[b, t] = wte[tokens[b, t]] + wpe[t].  out (B, T, C), tokens (B, T) int, wte (Vp, C), wpe (context, C)."""
    for sequence, row in zip(out, tokens, strict=True):
        np.take(wte, row, axis=0, out=sequence, mode="clip")
        sequence += wpe[: len(sequence)]


def embedding_backward(cores, dwte, dwpe, dout, tokens, accumulate):
    """dwte[token] += the sum of dout where it stood; dwpe[t] = or += the sum over b.

    dwte is always added to: it is tied to the head, whose gradient is written first. Rows are sorted by token and
    summed group by group: no scatter with collisions, and always the same order of additions.
    """
    B, T, C = dout.shape
    order = np.argsort(tokens, axis=None, kind="stable")
    sorted_tokens = tokens.reshape(-1)[order]
    group_starts = np.flatnonzero(np.r_[True, sorted_tokens[1:] != sorted_tokens[:-1]])
    rows = cores.scratch("embedding", (B * T, C), dout.dtype)
    np.take(dout.reshape(-1, C), order, axis=0, out=rows, mode="clip")
    dwte[sorted_tokens[group_starts]] += np.add.reduceat(rows, group_starts, axis=0)
    if not accumulate:
        dwpe[:] = 0.0
    for sequence in dout:
        dwpe[:T] += sequence
