"""Work that can be done in two ways: whichever takes less time on this GPU, timed once for each shape,
or given by a process that has timed both before.

One way is our own kernels, which are always there. The other is a product's epilogue, which spares a kernel that reads
and writes the product's output once more, but may slow the product down by more than that; or cuDNN's attention.
"""

import math

from gpt2.kernels.cupy.launch import storage

EPILOGUES = ("gelu", "dgelu", "bias gradient")  # work of which cuBLASLt has an epilogue
ATTENTION = ("attention", "attention backward")
BFLOAT16_ONLY = ("gelu", "dgelu", *ATTENTION)  # elsewhere GELU's digits are too few, and cuDNN has no float32


class FasterOf:
    """device.faster_of. time_ms(run) is how long run() takes on the stream.

    epilogues: "faster", "always" or "never". attention: "faster", "cudnn" or "own".
    """

    def __init__(self, time_ms, epilogues: str, attention: str):
        self._time_ms = time_ms
        taken = {"cudnn": "always", "own": "never"}.get(attention, attention)
        self._taken = dict.fromkeys(EPILOGUES, epilogues) | dict.fromkeys(ATTENTION, taken)
        self.times_ms = {}  # (work, out's shape, storage): (theirs, ours)
        self._given = {}  # by the same: whether it is theirs

    def choices(self) -> dict[tuple, bool]:
        """What is chosen by now: whether it is theirs, by (work, out's shape, storage)."""
        return {key: theirs_ms <= ours_ms for key, (theirs_ms, ours_ms) in self.times_ms.items()} | self._given

    def give(self, choices: dict[tuple, bool]) -> None:
        """Take these from now on, in place of what is timed by now and of what would be."""
        self._given |= choices

    def __call__(self, work: str, out, theirs, ours, repeatable: bool = True) -> None:
        """Run theirs() or ours(): both do `work` and give `out` the same values, but for rounding.

        repeatable: either may run many times without harm, so they can be timed; until then it is ours(). Where theirs
        does not exist, or cannot do it, it raises an exception; that is ours() then, unless theirs was asked for.
        """
        key, taken = (work, out.shape, storage(out)), self._taken[work]
        if taken == "never" or (work in BFLOAT16_ONLY and key[-1] != "bfloat16"):
            return ours()
        if taken == "always":
            return theirs()
        if key in self._given:
            return theirs() if self._given[key] else ours()
        if key not in self.times_ms:
            if not repeatable:
                return ours()
            self.times_ms[key] = self._theirs_ms(theirs), self._time_ms(ours)
        theirs_ms, ours_ms = self.times_ms[key]
        return theirs() if theirs_ms <= ours_ms else ours()

    def _theirs_ms(self, theirs) -> float:
        try:
            return self._time_ms(theirs)
        except Exception:  # cuDNN's Python layer raises whatever it likes; ours is always there
            return math.inf
