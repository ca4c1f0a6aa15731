"""Causal self-attention, by blocks of query rows that skip the keys after them.

    S = Q K^T / sqrt(head size), masked above the diagonal;  P = softmax(S);  O = P V

Only each row's logsumexp is kept, and backward makes P again from it (Dao et al. 2022, without the GPU): memory grows
with T, not with T^2. A thread takes a few heads of one sequence, copied so that each head lies contiguous.
"""

import math

import numpy as np

ROWS = 128  # query rows a block
HEADS_BYTES = 1 << 20  # heads a thread works on at once


def _heads(packed, parts: int, head_count: int):
    """View (B, T, parts*C) as `parts` arrays (B, H, T, head size)."""
    B, T, width = packed.shape
    split = packed.reshape(B, T, parts, head_count, width // (parts * head_count))
    return [split[:, :, part].transpose(0, 2, 1, 3) for part in range(parts)]


def _for_head_groups(cores, B, H, T, head_size, itemsize, work):
    """work(b, heads) for slices of heads whose scratch fits the cache, spread over the threads."""
    head_bytes = itemsize * T * (6 * head_size + 2 * min(T, ROWS))
    group = max(1, min(-(-B * H // cores.threads), H, HEADS_BYTES // head_bytes))
    groups = [(b, slice(h, min(h + group, H))) for b in range(B) for h in range(0, H, group)]

    def run(start, stop):
        for b, heads in groups[start:stop]:
            work(b, heads)

    cores.for_blocks(len(groups), len(groups), run)


def _contiguous(cores, name, heads_view):
    copy = cores.scratch(name, heads_view.shape, heads_view.dtype)
    np.copyto(copy, heads_view)
    return copy


def _causal_mask(rows: int, dtype):
    """0 on and below the diagonal, a number that exp turns to 0 above it; (rows, rows)."""
    return np.triu(np.full((rows, rows), -1e30, dtype), 1)


def _masked_scores(cores, q, k, start, stop, mask):
    """S of query rows [start, stop) against keys [0, stop): (heads, stop - start, stop)."""
    scores = cores.scratch("scores", (len(q), stop - start, stop), q.dtype)
    np.matmul(q[:, start:stop], k[:, :stop].transpose(0, 2, 1), out=scores)
    scores[:, :, start:] += mask[: stop - start, : stop - start]
    return scores


def attention_forward(cores, out, logsumexp, qkv, head_count):
    """out (B, T, C); logsumexp (B, H, T), kept for backward; qkv (B, T, 3C): queries, keys, values side by side."""
    B, T, _ = qkv.shape
    (out_heads,) = _heads(out, 1, head_count)
    q_all, k_all, v_all = _heads(qkv, 3, head_count)
    head_size = q_all.shape[-1]
    mask = _causal_mask(min(T, ROWS), qkv.dtype)

    def work(b, heads):
        q, k, v = (_contiguous(cores, name, x[b, heads]) for name, x in (("q", q_all), ("k", k_all), ("v", v_all)))
        q *= 1.0 / math.sqrt(head_size)
        for start in range(0, T, ROWS):
            stop = min(start + ROWS, T)
            scores = _masked_scores(cores, q, k, start, stop, mask)
            row_max = scores.max(axis=2, keepdims=True)
            scores -= row_max
            np.exp(scores, out=scores)
            row_sum = scores.sum(axis=2, keepdims=True)
            block = cores.scratch("block", (len(q), stop - start, head_size), q.dtype)
            np.matmul(scores, v[:, :stop], out=block)
            np.divide(block, row_sum, out=out_heads[b, heads, start:stop])
            logsumexp[b, heads, start:stop] = (row_max + np.log(row_sum))[:, :, 0]

    _for_head_groups(cores, B, head_count, T, head_size, qkv.itemsize, work)


def attention_backward(cores, dqkv, dout, qkv, out, logsumexp, head_count):
    """dqkv (B, T, 3C) from dout (B, T, C) and what forward saw and kept.

    dV = P^T dO;  dP = dO V^T;  dS = P (dP - rowsum(dO O));  dQ = dS K;  dK = dS^T Q.
    """
    B, T, _ = qkv.shape
    dout_all, out_all = _heads(dout, 1, head_count)[0], _heads(out, 1, head_count)[0]
    q_all, k_all, v_all = _heads(qkv, 3, head_count)
    dq_all, dk_all, dv_all = _heads(dqkv, 3, head_count)
    head_size = q_all.shape[-1]
    scale = 1.0 / math.sqrt(head_size)
    mask = _causal_mask(min(T, ROWS), qkv.dtype)

    def work(b, heads):
        q, k, v = (_contiguous(cores, name, x[b, heads]) for name, x in (("q", q_all), ("k", k_all), ("v", v_all)))
        do = _contiguous(cores, "do", dout_all[b, heads])
        row_dot = np.einsum("htd,htd->ht", do, out_all[b, heads])
        q *= scale
        dk, dv, product = (cores.scratch(name, k.shape, k.dtype) for name in ("dk", "dv", "product"))
        dk[:], dv[:] = 0.0, 0.0
        for start in range(0, T, ROWS):
            stop = min(start + ROWS, T)
            block = slice(start, stop)
            p = _masked_scores(cores, q, k, start, stop, mask)
            p -= logsumexp[b, heads, block, None]
            np.exp(p, out=p)
            dv[:, :stop] += np.matmul(p.transpose(0, 2, 1), do[:, block], out=product[:, :stop])
            ds = cores.scratch("ds", p.shape, p.dtype)
            np.matmul(do[:, block], v[:, :stop].transpose(0, 2, 1), out=ds)
            ds -= row_dot[:, block, None]
            ds *= p
            dk[:, :stop] += np.matmul(ds.transpose(0, 2, 1), q[:, block], out=product[:, :stop])
            dq = np.matmul(ds, k[:, :stop], out=product[:, : stop - start])
            np.multiply(dq, scale, out=dq_all[b, heads, block])
        dk_all[b, heads], dv_all[b, heads] = dk, dv

    _for_head_groups(cores, B, head_count, T, head_size, qkv.itemsize, work)
