"""Causal self-attention in blocks of query rows, which skip all later keys.

    S = Q K^T / sqrt(head size), masked above the diagonal;  P = softmax(S);  O = P V

Only the logsumexp of each row is kept; backward recomputes P from it (Dao et al. 2022). So memory grows with T, not
with T^2. A thread takes a few heads of one sequence, copied so that each head is contiguous.
"""

import math

import numpy as np

from gpt2.kernels.numpy import loops

ROWS = 128  # query rows in a block
HEADS_BYTES = 4 << 20  # a thread's working set


def attention_forward(cores, out, logsumexp, qkv, head_count, first=None):
    """Compute out (B, T, C) and logsumexp (B, H, T), for backward, from qkv (B, T, 3C): queries, keys and values.

    first: compute only the rows from this position on; None for all. Earlier rows of the outputs may be overwritten.
    """
    T = qkv.shape[1]
    (out_heads,) = _heads(out, 1, head_count)
    parts = _heads(qkv, 3, head_count)
    scale = _scale(parts[0])

    def work(b, heads):
        q, k, v = (part[b, heads] for part in parts)
        if first is None:  # for few rows, copying costs more than it saves
            q, k, v = (cores.near(name, part) for name, part in zip("qkv", (q, k, v), strict=True))
        for start in range(first or 0, T, ROWS):
            stop = min(start + ROWS, T)
            p = _product(cores, "p", logsumexp.dtype, q[:, start:stop], k[:, :stop])
            loops.causal_softmax(p, logsumexp[b, heads], start, scale)
            cores.matmul(p, v[:, :stop], out_heads[b, heads, start:stop])

    _for_head_groups(cores, parts[0], work)


def attention_backward(cores, dqkv, dout, qkv, out, logsumexp, head_count):
    """Compute dqkv (B, T, 3C) from dout (B, T, C) and forward's inputs and outputs.

    dV = P^T dO;  dP = dO V^T;  dS = P (dP - rowsum(dO O));  dQ = dS K;  dK = dS^T Q.
    """
    T = qkv.shape[1]
    (dout_all,) = _heads(dout, 1, head_count)
    (out_all,) = _heads(out, 1, head_count)
    parts = _heads(qkv, 3, head_count)
    dq_all, dk_all, dv_all = _heads(dqkv, 3, head_count)
    scale = _scale(parts[0])

    def work(b, heads):
        q, k, v = (cores.near(name, part[b, heads]) for name, part in zip("qkv", parts, strict=True))
        do = cores.near("do", dout_all[b, heads])
        out_dots = np.einsum("htd,htd->ht", do, cores.exact("out", out_all[b, heads]))
        dk = cores.scratch("dk", k.shape, dout.dtype)
        dv = cores.scratch("dv", k.shape, dout.dtype)
        for start in reversed(range(0, T, ROWS)):  # the last rows first: they see all keys
            stop = min(start + ROWS, T)
            p = _product(cores, "p", logsumexp.dtype, q[:, start:stop], k[:, :stop])
            ds = _product(cores, "ds", logsumexp.dtype, do[:, start:stop], v[:, :stop])
            loops.causal_softmax_backward(p, ds, logsumexp[b, heads], out_dots, start, scale)
            cores.matmul(p.transpose(0, 2, 1), do[:, start:stop], dv[:, :stop], add=stop < T)
            cores.matmul(ds.transpose(0, 2, 1), q[:, start:stop], dk[:, :stop], add=stop < T)
            cores.matmul(ds, k[:, :stop], dq_all[b, heads, start:stop])
        cores.store(dk_all[b, heads], dk)
        cores.store(dv_all[b, heads], dv)

    _for_head_groups(cores, parts[0], work)


def _heads(packed, parts: int, head_count: int):
    """View (B, T, parts*C) as `parts` arrays (B, H, T, head size)."""
    B, T, width = packed.shape
    split = packed.reshape(B, T, parts, head_count, width // (parts * head_count))
    return [split[:, :, part].transpose(0, 2, 1, 3) for part in range(parts)]


def _scale(q_all):
    return np.promote_types(q_all.dtype, np.float32).type(1.0 / math.sqrt(q_all.shape[-1]))


def _for_head_groups(cores, q_all, work):
    """Call work(b, heads) for slices of heads whose scratch fits the cache, spread over the threads."""
    B, H, T, head_size = q_all.shape
    head_bytes = max(4, q_all.itemsize) * T * (6 * head_size + 2 * min(T, ROWS))
    group = max(1, min(-(-B * H // cores.threads), H, HEADS_BYTES // head_bytes))
    groups = [(b, slice(h, min(h + group, H))) for b in range(B) for h in range(0, H, group)]

    def some_groups(start, stop):
        for b, heads in groups[start:stop]:
            work(b, heads)

    cores.for_parts(len(groups), some_groups)


def _product(cores, name, dtype, rows, columns):
    """Return rows (heads, n, head size) @ columns (heads, m, head size)^T: (heads, n, m), in scratch of that name."""
    out = cores.scratch(name, (len(rows), rows.shape[1], columns.shape[1]), dtype)
    cores.matmul(rows, columns.transpose(0, 2, 1), out)
    return out
