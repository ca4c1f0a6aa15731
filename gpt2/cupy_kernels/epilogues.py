"""Work that a product can do in its epilogue, or a kernel after it: whichever takes less time on this GPU.

A kernel of its own reads and writes the product's output once more; an epilogue may slow the product down by more than
that. What is faster depends on shape and GPU, so both ways are timed, once for each shape.
"""

import math

from gpt2.cupy_kernels.launch import storage

WAYS = ("faster", "always", "never")  # in the epilogue
BFLOAT16_ONLY = ("gelu", "dgelu")  # cuBLASLt does not promise as many digits of GELU as float32 has


class Epilogues:
    """device.faster_of. time_ms(run) is how long run() takes on the stream; way: one of WAYS."""

    def __init__(self, time_ms, way: str):
        self._time_ms, self._way = time_ms, way
        self.times_ms = {}  # (work, out's shape, storage): (in the epilogue, apart)

    def __call__(self, work: str, out, fused, apart, repeatable: bool = True) -> None:
        """Run fused() or apart(): both do `work` and give `out` the same values, but for rounding.

        repeatable: either may run many times without harm, so they can be timed; until then it is apart().
        """
        key = work, out.shape, storage(out)
        if self._way == "never" or (work in BFLOAT16_ONLY and key[-1] != "bfloat16"):
            return apart()
        if self._way == "faster" and key not in self.times_ms:
            if not repeatable:
                return apart()
            self.times_ms[key] = self._fused_ms(fused), self._time_ms(apart)
        fused_ms, apart_ms = self.times_ms.get(key, (0.0, math.inf))
        return fused() if fused_ms <= apart_ms else apart()

    def _fused_ms(self, fused) -> float:
        try:
            return self._time_ms(fused)
        except RuntimeError:  # matmul's: cuBLASLt has no such epilogue
            return math.inf
