"""The bfloat16 parameters that a model computes with, rounded from float32: to nearest, or stochastically.

Stochastic rounding takes one of a value's two neighbours, with the probabilities that make the mean exact (Gupta et al.
2015). The draw of an element depends only on the seed, the step and the element's index among all parameters. So every
rank that rounds an element gets the same bits, whatever range it rounds.
"""

from collections.abc import Callable

SPLITMIX64_STEP = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio, odd


def splitmix64(state: int) -> int:
    """Return the 64-bit number that follows the 64-bit `state` (Steele, Lea and Flood 2014)."""
    z = (state + SPLITMIX64_STEP) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def step_seed(seed: int, step: int) -> int:
    """Return the seed of a step's draws. Draws of different steps, or with different seeds, are unrelated."""
    return splitmix64(splitmix64(seed) + step)


class RoundedParameters:
    """A model's bfloat16 parameters `flat`, (size,) or Slots, rounded from float32 parameters.

    An AdamW update rounds its own range into `target` in the kernel launch of its step. Other ranks update the other
    ranges: `missing` lists them, and `store` rounds them before use.

    round_parameters(target, values, rounding_seed, first): the kernel that rounds. seed: None rounds to nearest. step:
    the last step made; skipped steps count, so that all ranks have the same count.
    """

    def __init__(self, flat, round_parameters: Callable[..., None], seed: int | None = None, step: int = 0):
        self.flat = flat
        self.step = step
        self._round_parameters = round_parameters
        self._seed = seed
        self._written = []

    @property
    def rounding_seed(self) -> int | None:
        """The seed of this step's draws, for the kernels; None rounds to nearest."""
        return None if self._seed is None else step_seed(self._seed, self.step)

    def begin_update(self) -> None:
        """Begin a step: no range of `flat` has the new parameters yet."""
        self.step += 1
        self._written = []

    def target(self, start: int, stop: int):
        """Return the array for an update's parameters [start, stop), to be rounded by this step's rounding_seed."""
        self._written.append((start, stop))
        return self.flat[start:stop]

    def missing(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the ranges within [start, stop) that no update of this step has written."""
        parts = []
        for low, high in sorted(self._written):
            if start < min(low, stop):
                parts.append((start, min(low, stop)))
            start = max(start, high)
        return [*parts, (start, stop)] if start < stop else parts

    def store(self, start: int, values) -> None:
        """Round values (n,) float32 into the parameters from `start` on. Queued on CuPy's current stream."""
        self._round_parameters(self.flat[start : start + len(values)], values, self.rounding_seed, start)
