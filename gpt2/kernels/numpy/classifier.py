"""The tied head with softmax cross-entropy. Logits are computed once, in blocks of columns, and stored as exponentials.

    loss_n = log sum_v exp(logit_nv - logit_n,target),    dlogits = row_scale_n (E - onehot(target) rowsum(E))

Each row is shifted by its target's logit, not by its largest one. The target's logit is known beforehand, so one pass
is enough, and the loss is the logarithm of the sum. Backward scales the small operands of its products by 1 / sum.
"""

from functools import partial

import numpy as np

from gpt2.kernels.numpy import loops
from gpt2.kernels.numpy.layers import backward_products
from gpt2.model_shards import ONE_SHARD

COLUMNS = 1024
ROWS = 1024
LARGEST_SUM = 1e26  # beyond it (a loss above 59) float32 may overflow: shift by the row's maximum instead


def classifier_forward(
    cores, losses, exponentials, row_scale, inputs, wte, targets, vocab_size, scale,
    first_token=0, tp_group=ONE_SHARD, blocks=None, target_rows=None,
):  # fmt: skip
    """Compute losses (N,) of inputs (N, C) against targets (N,), with wte (Vp, C).

    For classifier_backward it stores exponentials (N, Vp) and row_scale (N,), whose product is dlogits * scale. Both
    are None if only the losses are wanted. The pad columns [V, Vp) take no part, and get gradient 0.

    With a vocabulary shard, wte has the rows from first_token on. tp_group.sum(rows) and tp_group.maximum(rows) combine
    rows (N,) of all shards, and all shards get all losses. Two sums of N numbers are exchanged.

    blocks: yields the rows [start, stop) of wte to use next, as soon as they have arrived; None uses all at once.
    target_rows: (a table, the row of it for each target (N,)), for the targets' logits before all of wte has arrived.
    """
    known = min(max(0, vocab_size - first_token), len(wte))  # pad rows do not count; the last shard may have only those
    own = np.flatnonzero((targets >= first_token) & (targets < first_token + known))
    columns = targets[own] - first_token
    table, places = target_rows or (wte, columns)
    target_logits = tp_group.sum(_target_logits(cores, inputs, table, own, places.reshape(-1)))
    row_sum = tp_group.sum(_exponentials(cores, exponentials, inputs, wte[:known], target_logits, blocks))
    shift = target_logits
    if not (row_sum < LARGEST_SUM).all():
        shift = tp_group.maximum(_row_maximum(cores, inputs, wte[:known]))
        row_sum = tp_group.sum(_exponentials(cores, exponentials, inputs, wte[:known], shift))
    losses[:] = np.log(row_sum) + (shift - target_logits)
    if exponentials is not None:
        exponentials[own, columns] = exponentials[own, columns].astype(losses.dtype, copy=False) - row_sum[own]
        exponentials[:, known:] = 0.0
        np.divide(scale, row_sum, out=row_scale)


def _target_logits(cores, inputs, table, own, places):
    """Return the logit of each row's target (N,), or 0 where another shard has it.

    own: the rows whose targets are in this shard. places: their targets' rows in the table.
    """
    inputs = cores.exact("target_inputs", inputs)
    if len(own) == len(inputs):
        rows = cores.scratch("target_rows", inputs.shape, inputs.dtype)
        np.take(table, places, axis=0, out=rows, mode="clip")
        return np.einsum("nc,nc->n", inputs, cores.as_operand(rows))
    logits = np.zeros(len(inputs), inputs.dtype)
    logits[own] = np.einsum("nc,nc->n", inputs[own], cores.as_operand(table[places]))
    return logits


def classifier_backward(cores, dinputs, dwte, exponentials, row_scale, inputs, wte, accumulate, blocks=None):
    """Compute dinputs (N, C) = dlogits @ wte; dwte (Vp, C) = or += dlogits.T @ inputs, from the arrays of forward.

    blocks: as in classifier_forward; a block's dwte is final when the next one is taken.
    """

    def scale_rows(result, rows, columns):
        result[:, columns] *= row_scale[rows, None]

    def add_scaled(result, rows, columns):
        scale_rows(result, rows, columns)
        dinputs[rows, columns] += result[:, columns]

    scaled = cores.scratch("scaled_inputs", inputs.shape, dinputs.dtype)
    np.multiply(cores.exact("target_inputs", inputs), row_scale[:, None], out=scaled)
    product = dinputs
    finish = scale_rows
    for start, stop in blocks or [(0, len(wte))]:
        operands = exponentials[:, start:stop], scaled, wte[start:stop]
        backward_products(cores, product, dwte[start:stop], *operands, accumulate, finish, None)
        product = cores.scratch("dinputs_of_block", dinputs.shape, dinputs.dtype)
        finish = add_scaled


def _exponentials(cores, out, inputs, weight, shift, blocks=None):
    """Set out (N, Vp), unless None, to exp(inputs @ weight.T - shift[:, None]), and return the row sums (N,)."""

    def add_block(sums, logits, rows, first_column):
        kept = None if out is None else loops.bits(out[rows])
        loops.add_exponentials(kept, first_column, sums, logits, shift[rows])

    return _reduce_logits(cores, inputs, weight, np.add, 0.0, add_block, blocks)


def _row_maximum(cores, inputs, weight):
    """Return the largest logit of each row (N,)."""

    def add_block(maximum, logits, rows, first_column):
        np.maximum(maximum, logits.max(axis=1), out=maximum)

    return _reduce_logits(cores, inputs, weight, np.maximum, -np.inf, add_block)


def _reduce_logits(cores, inputs, weight, combine, start_value, add_block, blocks=None):
    """Call add_block(result, logits, rows, first_column) for each block of logits; return the combined results (N,)."""
    N = len(inputs)
    V = len(weight)
    sums = {}

    def some_columns(first, start, stop):
        start = first + start
        stop = first + stop
        result = sums[start] = np.full(N, start_value, weight.dtype)
        for low in range(start, stop, COLUMNS):
            high = min(low + COLUMNS, stop)
            for row in range(0, N, ROWS):
                rows = slice(row, min(row + ROWS, N))
                logits = cores.scratch("logits", (rows.stop - row, high - low), weight.dtype)
                cores.matmul(inputs[rows], weight[low:high].T, logits)
                add_block(result[rows], logits, rows, low)

    for first, last in blocks or [(0, V)]:  # pad rows have no logits
        cores.for_parts(max(0, min(last, V) - first), partial(some_columns, first))
    with np.errstate(over="ignore"):  # a sum that overflows is computed again, with another shift
        return combine.reduce([sums[start] for start in sorted(sums)])
