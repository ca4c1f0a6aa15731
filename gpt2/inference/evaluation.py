"""Losses of texts under a model: rows of tokens of any length, and a long text by overlapping windows."""

import math

import numpy as np

from gpt2.errors import UserError
from gpt2.model import GPT2
from gpt2.parameters import Parameters

LENGTHS = 32  # rows are padded to a multiple of it: each length needs buffers of its own, so there should be few


class Scorer:
    """The losses of rows of tokens, `batch_size` rows at a time.

    kernels may be of any set; parameters are whole, where that set wants them. report(done, total) is called after each
    batch, with numbers of rows.
    """

    def __init__(self, kernels, parameters: Parameters, batch_size: int, report=None):
        self.kernels, self.parameters, self.batch_size = kernels, parameters, batch_size
        self._model, self._report = None, report

    def losses(self, rows: list[np.ndarray]) -> list[np.ndarray]:
        """For each row (n,) of tokens, 2 <= n <= context + 1, the losses (n - 1,) float64 of all but its first token.

        The longest rows come first, so that too little memory shows at once. UserError: a loss is not finite.
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
            self._model = None  # its buffers first: two lengths' need not fit together
            self._model = GPT2(self.kernels, self.parameters, None, self.batch_size, length)
        inputs, targets = np.zeros((2, self.batch_size, length), np.int32)
        for index, row in enumerate(rows):
            inputs[index, : len(row) - 1], targets[index, : len(row) - 1] = row[:-1], row[1:]
        losses = self.kernels.to_host(self._model.token_losses(inputs, targets))
        kept = [losses[index, : len(row) - 1].astype(np.float64) for index, row in enumerate(rows)]
        if not all(np.isfinite(row).all() for row in kept):
            raise UserError("the model's losses are not finite: the weights are damaged, or their training diverged")
        return kept


def strided_windows(count: int, length: int, stride: int) -> list[tuple[int, int, int]]:
    """(start, stop, first scored) of windows over `count` tokens. Each token but the first is scored once.

    Window w begins at token w * stride and predicts tokens start + 1 .. stop - 1, at most `length`, each from those
    before it in the window. It scores those that no earlier window has scored: the first window all of them, the others
    the last `stride`, or what is left. So each token is predicted from at least the `length - stride` tokens before it,
    as far as there are so many.
    """
    windows, scored = [], 1
    for start in range(0, max(count - 1, 0), stride):
        stop = min(start + length + 1, count)
        windows.append((start, stop, scored))
        scored = stop
        if stop == count:
            break
    return windows


def text_losses(scorer: Scorer, tokens: np.ndarray, windows) -> float:
    """Sum of the losses, in nats, that these windows of strided_windows score; tokens (n,)."""
    losses = scorer.losses([tokens[start:stop] for start, stop, _ in windows])
    pairs = zip(losses, windows, strict=True)
    return math.fsum(row[scored - start - 1 :].sum() for row, (start, _, scored) in pairs)


def perplexity(loss: float) -> float:
    """e**loss for a mean loss in nats; infinite where that is too large for a float."""
    return math.exp(loss) if loss < 700 else math.inf
