"""From the global norm of a step's gradients to the factor that they are taken by, or to no update at all."""

import math
import statistics
from collections import deque

WINDOW = 128  # steps that a norm is compared with, as in llm.c


class Clipping:
    """Clips the global norm to max_norm (0: never), and skips steps whose norm stands out.

    outlier_z: skip a step whose norm is that many standard deviations above the mean of the last `window` steps' (0:
    never; llm.c's -sg), once there are so many. `norms` are theirs: part of a run's state. `skips`: the last step.
    """

    def __init__(self, max_norm: float, outlier_z: float = 0.0, window: int = WINDOW):
        self.max_norm, self.outlier_z = max_norm, outlier_z
        self.norms, self.skips = deque(maxlen=window), False

    def scale(self, sum_of_squares: float) -> tuple[float, float | None]:
        """(norm, factor for the gradients), or (norm, None) for a step to be skipped."""
        norm, factor = clip_scale(sum_of_squares, self.max_norm)
        if self.outlier_z:
            self.skips = self._stands_out(norm)
            if math.isfinite(norm):
                self.norms.append(norm)  # an outlier, too: what happens again and again is none
        return norm, None if self.skips else factor

    def _stands_out(self, norm: float) -> bool:
        if not math.isfinite(norm):
            return True
        if len(self.norms) < self.norms.maxlen:
            return False
        return norm - statistics.fmean(self.norms) > self.outlier_z * statistics.pstdev(self.norms)


def clip_scale(sum_of_squares: float, max_norm: float) -> tuple[float, float]:
    """(norm, factor for the gradients): the factor brings a norm above max_norm down to it; max_norm 0 never clips."""
    norm = math.sqrt(sum_of_squares)
    return norm, max_norm / norm if 0.0 < max_norm < norm else 1.0
