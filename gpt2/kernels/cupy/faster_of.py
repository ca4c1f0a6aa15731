"""Choose the faster of two implementations on this GPU: time both once for each shape, or use given choices.

One implementation is our own kernels. The other is from a library: a product's epilogue, or cuDNN's attention. An
epilogue saves a kernel that reads and writes the product's output again, but may slow the product by more than that.
"""

import math

from gpt2.kernels.cupy.launch import storage

EPILOGUES = ("gelu", "dgelu", "bias gradient")  # work that cuBLASLt can do in an epilogue
ATTENTION = ("attention", "attention backward")
# In float32 the epilogue's GELU is too inexact, and cuDNN has no attention.
BFLOAT16_ONLY = ("gelu", "dgelu", *ATTENTION)


class FasterOf:
    """Run the faster of two implementations (device.faster_of). time_ms(run) returns the time of run() on the stream.

    epilogues: "faster", "always" or "never". attention: "faster", "cudnn" or "own".

    choices: {(work, out's shape, storage): whether theirs is faster}. Choices that a caller adds are not timed.
    times_ms: (theirs, ours) of the others.
    """

    def __init__(self, time_ms, epilogues: str, attention: str):
        self._time_ms = time_ms
        taken = {"cudnn": "always", "own": "never"}.get(attention, attention)
        self._taken = dict.fromkeys(EPILOGUES, epilogues) | dict.fromkeys(ATTENTION, taken)
        self.times_ms = {}
        self.choices = {}

    def __call__(self, work: str, out, theirs, ours, repeatable: bool = True) -> None:
        """Run theirs() or ours(). Both do `work`, and write the same values to `out`, except for rounding.

        repeatable: both may run many times, so they can be timed; otherwise, if not yet timed, ours() runs. If
        theirs() raises an exception while it is timed, ours() is chosen.
        """
        key = (work, out.shape, storage(out))
        taken = self._taken[work]
        if taken == "never" or (work in BFLOAT16_ONLY and key[-1] != "bfloat16"):
            return ours()
        if taken == "always":
            return theirs()
        if key not in self.choices:
            if not repeatable:
                return ours()
            self.times_ms[key] = self._theirs_ms(theirs), self._time_ms(ours)
            theirs_ms, ours_ms = self.times_ms[key]
            self.choices[key] = theirs_ms <= ours_ms
        return theirs() if self.choices[key] else ours()

    def _theirs_ms(self, theirs) -> float:
        try:
            return self._time_ms(theirs)
        except Exception:  # cuDNN's Python layer may raise anything
            return math.inf
