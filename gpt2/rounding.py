"""From float32 parameters to the bfloat16 ones that a model computes with: to nearest, or up or down at random.

At random, a value goes to one of its two neighbours with the probability that makes the mean exact (Gupta et al. 2015).
What is drawn depends on seed, step and the element's place among all parameters, and on nothing else: whoever rounds an
element, in whatever range, on whatever rank, gets the same bits.
"""

from collections.abc import Callable

SPLITMIX64_STEP = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio, odd


def splitmix64(state: int) -> int:
    """The number that follows `state`, 64 bits to 64 bits (Steele, Lea and Flood 2014)."""
    z = (state + SPLITMIX64_STEP) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def step_seed(seed: int, step: int) -> int:
    """What the draws of a step begin with: those of two steps, or two seeds, are as far apart as random numbers."""
    return splitmix64(splitmix64(seed) + step)


class RoundedParameters:
    """A model's bfloat16 parameters `flat`, (size,) or Slots, which are float32 ones rounded.

    An update writes those of its own range (`target`), in the launch that makes the step; all others, which other ranks
    have updated or nobody has, are to be rounded before they are used: `missing`, `store`. round_parameters(target,
    values, rounding_seed, first): the kernel that does it. seed: of the draws; None: to nearest. step: the last that
    was made, also one whose update was skipped, so that all ranks count alike.
    """

    def __init__(self, flat, round_parameters: Callable[..., None], seed: int | None = None, step: int = 0):
        self.flat, self.step = flat, step
        self._round_parameters, self._seed, self._written = round_parameters, seed, []

    @property
    def rounding_seed(self) -> int | None:
        """This step's, as kernels want it."""
        return None if self._seed is None else step_seed(self._seed, self.step)

    def begin_update(self) -> None:
        """Another step: what is there is that of the step before."""
        self.step += 1
        self._written = []

    def target(self, start: int, stop: int):
        """Where an update is to write parameters [start, stop), rounded by this step's rounding_seed."""
        self._written.append((start, stop))
        return self.flat[start:stop]

    def missing(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The parts of [start, stop) that the update has not written."""
        parts = []
        for low, high in sorted(self._written):
            if start < min(low, stop):
                parts.append((start, min(low, stop)))
            start = max(start, high)
        return [*parts, (start, stop)] if start < stop else parts

    def store(self, start: int, values) -> None:
        """Round values (n,) float32 into the parameters from `start` on: queued on CuPy's current stream."""
        self._round_parameters(self.flat[start : start + len(values)], values, self.rounding_seed, start)
