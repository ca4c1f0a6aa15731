"""Causal self-attention, by blocks of query rows that skip the keys after them.

    S = Q K^T / sqrt(head size), masked above the diagonal;  P = softmax(S);  O = P V

Only each row's logsumexp is kept, and backward makes P again from it (Dao et al. 2022, without the GPU): memory grows
with T, not with T^2. A thread takes a few heads of one sequence, copied so that each head lies contiguous, with one
more column: [q, -shift] [k, 1]^T is S - shift, so no pass over S is spent on subtracting. Forward's shift is the row's
own diagonal score, which keeps the row's sum at 1 or above; backward's is the logsumexp, and likewise the row sums of
dO O for dP.
"""

import math

import numpy as np

ROWS = 128  # query rows a block
HEADS_BYTES = 4 << 20  # what a thread works on at once
LARGEST_SUM = 1e30  # beyond it float32 gets narrow: shift by the row's maximum after all


def attention_forward(cores, out, logsumexp, qkv, head_count):
    """out (B, T, C); logsumexp (B, H, T), kept for backward; qkv (B, T, 3C): queries, keys, values side by side."""
    B, T, _ = qkv.shape
    (out_heads,) = _heads(out, 1, head_count)
    q_all, k_all, v_all = _heads(qkv, 3, head_count)
    scale = 1.0 / math.sqrt(q_all.shape[-1])
    mask = _causal_mask(min(T, ROWS), qkv.dtype)

    def work(b, heads):
        q, k = _with_column(cores, "q", q_all[b, heads], scale), _with_column(cores, "k", k_all[b, heads])
        v = _with_column(cores, "v", v_all[b, heads])[:, :, :-1]
        k[:, :, -1] = 1.0
        np.einsum("htd,htd->ht", q[:, :, :-1], k[:, :, :-1], out=q[:, :, -1])
        np.negative(q[:, :, -1], out=q[:, :, -1])
        for start in range(0, T, ROWS):
            stop = min(start + ROWS, T)
            p, row_sum = _exponentials(cores, q, k, start, stop, mask)
            if not (row_sum < LARGEST_SUM).all():
                p, row_sum = _shift_by_maximum(cores, q, k, start, stop, mask)
            block = cores.scratch("block", (len(q), stop - start, v.shape[2]), q.dtype)
            np.matmul(p, v[:, :stop], out=block)
            np.divide(block, row_sum[:, :, None], out=out_heads[b, heads, start:stop])
            logsumexp[b, heads, start:stop] = np.log(row_sum) - q[:, start:stop, -1]

    _for_head_groups(cores, B, head_count, T, q_all.shape[-1], qkv.itemsize, work)


def attention_backward(cores, dqkv, dout, qkv, out, logsumexp, head_count):
    """dqkv (B, T, 3C) from dout (B, T, C) and what forward saw and kept.

    dV = P^T dO;  dP = dO V^T;  dS = P (dP - rowsum(dO O));  dQ = dS K;  dK = dS^T Q.
    """
    B, T, _ = qkv.shape
    dout_all, out_all = _heads(dout, 1, head_count)[0], _heads(out, 1, head_count)[0]
    q_all, k_all, v_all = _heads(qkv, 3, head_count)
    dq_all, dk_all, dv_all = _heads(dqkv, 3, head_count)
    scale = 1.0 / math.sqrt(q_all.shape[-1])
    mask = _causal_mask(min(T, ROWS), qkv.dtype)

    def work(b, heads):
        q = _with_column(cores, "q", q_all[b, heads], scale)
        k, v, do = (_with_column(cores, n, x[b, heads]) for n, x in (("k", k_all), ("v", v_all), ("do", dout_all)))
        k[:, :, -1] = v[:, :, -1] = 1.0
        np.negative(logsumexp[b, heads], out=q[:, :, -1])
        np.einsum("htd,htd->ht", do[:, :, :-1], out_all[b, heads], out=do[:, :, -1])
        np.negative(do[:, :, -1], out=do[:, :, -1])
        dk, dv, product = (cores.scratch(name, k[:, :, :-1].shape, k.dtype) for name in ("dk", "dv", "product"))
        for start in reversed(range(0, T, ROWS)):  # the last rows come first: they see all keys
            stop = min(start + ROWS, T)
            p, _ = _exponentials(cores, q, k, start, stop, mask, sums=False)
            ds = cores.scratch("ds", p.shape, p.dtype)
            np.matmul(do[:, start:stop], v[:, :stop].transpose(0, 2, 1), out=ds)
            ds *= p
            _add_product(dv, p, do[:, start:stop, :-1], product, write=stop == T)
            _add_product(dk, ds, q[:, start:stop, :-1], product, write=stop == T)
            dq = np.matmul(ds, k[:, :stop, :-1], out=product[:, : stop - start])
            np.multiply(dq, scale, out=dq_all[b, heads, start:stop])
        dk_all[b, heads], dv_all[b, heads] = dk, dv

    _for_head_groups(cores, B, head_count, T, q_all.shape[-1], qkv.itemsize, work)


def _add_product(total, left, right, product, write):
    """total[:, keys] = (if `write`) or += left^T right: left (heads, rows, keys), right (heads, rows, head size)."""
    keys = slice(0, left.shape[2])
    np.matmul(left.transpose(0, 2, 1), right, out=total[:, keys] if write else product[:, keys])
    if not write:
        total[:, keys] += product[:, keys]


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

    def some_groups(start, stop):
        for b, heads in groups[start:stop]:
            work(b, heads)

    cores.for_parts(len(groups), some_groups)


def _with_column(cores, name, heads_view, scale=1.0):
    """heads_view (heads, T, head size) * scale, contiguous, with one more column that is left to fill."""
    copy = cores.scratch(name, (*heads_view.shape[:2], heads_view.shape[2] + 1), heads_view.dtype)
    np.multiply(heads_view, scale, out=copy[:, :, :-1])
    return copy


def _causal_mask(rows: int, dtype):
    """0 on and below the diagonal, a number that exp turns to 0 above it; (rows, rows)."""
    return np.triu(np.full((rows, rows), -1e30, dtype), 1)


def _shifted_scores(cores, q, k, start, stop, mask):
    """S - shift of query rows [start, stop) against keys [0, stop): (heads, stop - start, stop)."""
    scores = cores.scratch("scores", (len(q), stop - start, stop), q.dtype)
    np.matmul(q[:, start:stop], k[:, :stop].transpose(0, 2, 1), out=scores)
    scores[:, :, start:] += mask[: stop - start, : stop - start]
    return scores


def _exponentials(cores, q, k, start, stop, mask, sums=True):
    """exp(S - shift) and its row sums (heads, rows), or None where the shift already makes them 1."""
    p = _shifted_scores(cores, q, k, start, stop, mask)
    with np.errstate(over="ignore"):  # seen, and mended, by the caller
        np.exp(p, out=p)
    return p, p.sum(axis=2) if sums else None


def _shift_by_maximum(cores, q, k, start, stop, mask):
    """Lower the shift of these rows by the largest shifted score, for good, and make the exponentials again."""
    q[:, start:stop, -1] -= _shifted_scores(cores, q, k, start, stop, mask).max(axis=2)
    return _exponentials(cores, q, k, start, stop, mask)
