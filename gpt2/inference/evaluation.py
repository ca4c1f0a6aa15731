"""Compute a model's losses on rows of tokens, and on a long text with overlapping windows."""

import math

import numpy as np

from gpt2.errors import UserError
from gpt2.model import GPT2
from gpt2.parameters import Parameters

LENGTHS = 32  # rows are padded to a multiple of this, because each length needs its own buffers


class Scorer:
    """Computes the losses of rows of tokens, `batch_size` rows at a time.

    kernels: any set; parameters: of a whole model. report(done, total) is called with numbers of rows after each batch.
    """

    def __init__(self, kernels, parameters: Parameters, batch_size: int, report=None):
        self.kernels = kernels
        self.parameters = parameters
        self.batch_size = batch_size
        self._model = None
        self._report = report

    def losses(self, rows: list[np.ndarray]) -> list[np.ndarray]:
        """Return the losses (n - 1,) float64 of all tokens but the first, for each row (n,), 2 <= n <= context + 1.

        The longest rows are computed first, so that a lack of memory shows at once. UserError: a loss is not finite.
        """
        order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
        found = {}
        for first in range(0, len(order), self.batch_size):
            batch = order[first : first + self.batch_size]
            found |= zip(batch, self._batch([rows[index] for index in batch]), strict=True)
            if self._report:
                self._report(len(found), len(rows))
        return [found[index] for index in range(len(rows))]

    def _batch(self, rows):
        longest = max(map(len, rows)) - 1
        length = min(-(-longest // LENGTHS) * LENGTHS, self.parameters.layout.config.context)
        if self._model is None or self._model.sequence_length != length:
            self._model = None  # free its buffers first: the buffers of two lengths may not fit together
            self._model = GPT2(self.kernels, self.parameters, None, self.batch_size, length)
        inputs, targets = np.zeros((2, self.batch_size, length), np.int32)
        for index, row in enumerate(rows):
            inputs[index, : len(row) - 1] = row[:-1]
            targets[index, : len(row) - 1] = row[1:]
        losses = self.kernels.to_host(self._model.token_losses(inputs, targets))
        kept = [losses[index, : len(row) - 1].astype(np.float64) for index, row in enumerate(rows)]
        if not all(np.isfinite(row).all() for row in kept):
            raise UserError("the model's losses are not finite: the weights are damaged, or their training diverged")
        return kept


def strided_windows(count: int, length: int, stride: int) -> list[tuple[int, int, int]]:
    """Return windows (start, stop, first scored) over `count` tokens that score each token but the first once.

    Window w begins at token w * stride and predicts at most `length` tokens, start + 1 .. stop - 1, from earlier ones
    in the window. It scores the tokens that no earlier window has scored. So each token is predicted from at least
    `length - stride` tokens before it, if there are that many.
    """
    windows = []
    scored = 1
    for start in range(0, max(count - 1, 0), stride):
        stop = min(start + length + 1, count)
        windows.append((start, stop, scored))
        scored = stop
        if stop == count:
            break
    return windows


def text_losses(scorer: Scorer, tokens: np.ndarray, windows) -> float:
    """Return the sum of the losses, in nats, of the tokens (n,) that windows of strided_windows score."""
    losses = scorer.losses([tokens[start:stop] for start, stop, _ in windows])
    pairs = zip(losses, windows, strict=True)
    return math.fsum(row[scored - start - 1 :].sum() for row, (start, _, scored) in pairs)


def perplexity(loss: float) -> float:
    """Return e**loss of a mean loss in nats; infinite if that is too large for a float."""
    return math.exp(loss) if loss < 700 else math.inf
