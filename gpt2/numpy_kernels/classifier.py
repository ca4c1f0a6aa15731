"""The tied head with softmax cross-entropy, by blocks of rows, so that the logits never leave the cache twice.

loss_n = logsumexp(logits_n) - logits_n[target_n],    dlogits = (softmax(logits) - onehot(target)) * scale
"""

import numpy as np

ROWS = 128


def classifier(cores, losses, dlogits, inputs, wte, targets, vocab_size, scale):
    """losses (N,) of inputs (N, C) against targets (N,); dlogits (N, Vp) or None where only the loss is wanted.

    The pad columns [V, Vp) take no part: they are left out of the sum, and their gradient is 0.
    """
    for start in range(0, len(inputs), ROWS):
        rows = slice(start, min(start + ROWS, len(inputs)))
        if dlogits is None:
            logits = cores.scratch("logits", (rows.stop - start, len(wte)), inputs.dtype)
        else:
            logits = dlogits[rows]
        np.matmul(inputs[rows], wte.T, out=logits)
        _softmax_rows(cores, losses[rows], logits, targets[rows], vocab_size, scale)


def _softmax_rows(cores, losses, logits, targets, vocab_size, scale):
    """Turn the logits of a few rows into their gradient, in place, and leave their losses."""

    def part(start, stop):
        rows = np.arange(stop - start)
        block, target = logits[start:stop, :vocab_size], targets[start:stop]
        row_max = block.max(axis=1, keepdims=True)
        block -= row_max
        target_logits = block[rows, target]
        np.exp(block, out=block)
        row_sum = block.sum(axis=1, keepdims=True)
        losses[start:stop] = np.log(row_sum[:, 0]) - target_logits
        block *= scale / row_sum
        block[rows, target] -= scale
        logits[start:stop, vocab_size:] = 0.0

    cores.for_rows(len(logits), logits.strides[0], part)
