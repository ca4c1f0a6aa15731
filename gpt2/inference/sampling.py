"""Drawing the next token: temperature, the k likeliest (Fan et al. 2018), the nucleus (Holtzman et al. 2020)."""

from dataclasses import dataclass

import numpy as np

from gpt2.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    temperature: the logits are divided by it; 0 takes the likeliest token (of equals the lowest id).
    top_k: only that many of the likeliest may be drawn, 0 for all; of equals the lower ids.
    top_p: and of these only the fewest, likeliest first, whose probabilities add up to at least top_p; 1 for all.
    """

    temperature: float = 0.8
    top_k: int = 200
    top_p: float = 1.0

    def __post_init__(self):
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"--temperature is {self.temperature}, expected a number of at least 0 (0: the likeliest)")
        if self.top_k < 0:
            raise UserError(f"--top-k is {self.top_k}, expected at least 1, or 0 for all tokens")
        if not 0 < self.top_p <= 1:
            raise UserError(f"--top-p is {self.top_p}, expected above 0 and at most 1 (1: all tokens)")

    def choose(self, logits: np.ndarray, random: np.random.Generator) -> int:
        """A token, drawn by one number of `random` (none with temperature 0). UserError: a logit is not finite."""
        if not np.isfinite(logits).all():
            raise UserError("the model's logits are not finite: the weights are damaged, or their training diverged")
        if self.temperature == 0:
            return int(np.argmax(logits))
        probabilities = self.probabilities(logits)
        drawable = np.flatnonzero(probabilities)
        reached = np.cumsum(probabilities[drawable])
        place = np.searchsorted(reached, random.random() * reached[-1], side="right")
        return int(drawable[min(place, len(drawable) - 1)])  # the product may round up to the whole

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        """(V,) float64, what each token is drawn with; logits (V,), temperature above 0."""
        with np.errstate(over="ignore"):  # of the smallest temperatures: exp(-inf) is right
            weights = np.exp((logits.astype(np.float64) - float(logits.max())) / self.temperature)
        if not (0 < self.top_k < len(weights) or self.top_p < 1):
            return weights / weights.sum()
        likeliest = np.argsort(-logits, kind="stable")[: self.top_k or None]
        kept = weights[likeliest] / weights[likeliest].sum()
        before = np.cumsum(kept) - kept
        count = max(1, int(np.sum(before < self.top_p)))
        probabilities = np.zeros_like(weights)
        probabilities[likeliest[:count]] = kept[:count] / kept[:count].sum()
        return probabilities
