"""Turn a range's gradients into its update: clipping by the global norm, the learning rate, and AdamW.

AdamW works on any flat range. A rank that updates a range creates an AdamW for it, which holds the moments of that
range only. That is all that sharding the optimizer state requires.
"""

import math
import statistics
from collections import deque
from dataclasses import dataclass

from gpt2.parameters import Layout
from gpt2.rounding import RoundedParameters, step_seed

NORM_WINDOW = 128  # each norm is compared with the norms of this many steps, as in llm.c
SCHEDULES = ("cosine", "linear", "constant", "wsd")
DECAY_SHARE = 0.2  # wsd: the last fifth of the steps decays (Hu et al. 2024, MiniCPM; llm.c's default)


class Clipping:
    """Clips the global norm of the gradients, and skips steps whose norm is an outlier.

    max_norm: larger norms are scaled down to it; 0 never clips. outlier_z: a step is skipped if its norm lies more than
    that many standard deviations above the mean of the last `window` norms (llm.c's -sg), once there are that many; 0
    never skips. `norms`, all finite, is stored in checkpoints. `skips`: whether the last step was skipped.
    over_model(sum of squares): the sum over all ranks that share a model.
    """

    def __init__(self, max_norm: float, outlier_z: float = 0.0, window: int = NORM_WINDOW, over_model=float):
        self.max_norm = max_norm
        self.outlier_z = outlier_z
        self.norms = deque(maxlen=window)
        self.skips = False
        self._over_model = over_model

    def scale(self, sum_of_squares: float) -> tuple[float, float | None]:
        """Return (norm, factor for the gradients), or (norm, None) to skip the step. Collective, with over_model."""
        norm, factor = clip_scale(self._over_model(sum_of_squares), self.max_norm)
        if self.outlier_z:
            self.skips = self._stands_out(norm)
            self.remember([norm])  # also outliers: a norm that recurs is no outlier
        return norm, None if self.skips else factor

    def remember(self, norms) -> None:
        """Add norms, the newest last. Norms that are not finite are left out: they would spoil the deviation."""
        self.norms.extend(norm for norm in norms if math.isfinite(norm))

    def _stands_out(self, norm: float) -> bool:
        if not math.isfinite(norm):
            return True
        if len(self.norms) < self.norms.maxlen:
            return False
        return norm - statistics.fmean(self.norms) > self.outlier_z * statistics.pstdev(self.norms)


def clip_scale(sum_of_squares: float, max_norm: float) -> tuple[float, float]:
    """Return (norm, factor for the gradients). The factor scales a norm above max_norm down to it; 0 never clips."""
    norm = math.sqrt(sum_of_squares)
    return norm, max_norm / norm if 0.0 < max_norm < norm else 1.0


@dataclass(frozen=True)
class LearningRateSchedule:
    """The rate rises to `lr` in `warmup` steps, falls to `min_lr` by step `steps`, and stays. name: in SCHEDULES."""

    name: str
    lr: float
    min_lr: float
    warmup: int
    steps: int

    def at(self, step: int) -> float:
        """Return the learning rate of step 1, 2, ..."""
        if step <= self.warmup:
            return self.lr * step / self.warmup
        done = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        match self.name:
            case "cosine":
                left = 0.5 * (1.0 + math.cos(math.pi * done))
            case "linear":
                left = 1.0 - done
            case "constant":
                left = 1.0
            case "wsd":
                left = 1.0 - math.sqrt(max(0.0, 1.0 - max(0, self.steps - step) / self.decay_steps))
        return self.min_lr + left * (self.lr - self.min_lr)

    @property
    def decay_steps(self) -> int:
        """The number of last steps that lower the rate, unless warm-up takes longer."""
        match self.name:
            case "constant":
                return 0
            case "wsd":
                return max(1, round(DECAY_SHARE * self.steps))
        return max(1, self.steps - self.warmup)


@dataclass(frozen=True)
class AdamWSettings:
    """Hyperparameters that stay the same over a run. The learning rate is an argument of each step.

    rounding_seed: of the draws that round the master copy to bfloat16 parameters up or down, so that they equal it on
    average (gpt2/rounding.py). None rounds to nearest.
    """

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    rounding_seed: int | None = None


class AdamW:
    """AdamW for parameters [start, stop). Its moments `m` and `v` are (stop - start,), unscaled as in the kernel.

    float32 parameters are updated in place. bfloat16 parameters have too few bits to add up small steps. The first
    update creates a float32 copy of them, `master` (stop - start,). Steps add up in the copy, and each writes the
    parameters anew, rounded. The result does not depend on how parameters are sharded. `master` is None for float32.

    rounded: the model's bfloat16 parameters, if the float32 parameters given to `update` are their master copy. Each
    update writes both.
    """

    def __init__(
        self, kernels, layout: Layout, start: int, stop: int, settings: AdamWSettings,
        rounded: RoundedParameters | None = None,
    ):  # fmt: skip
        self.kernels = kernels
        self.settings = settings
        self.rounded = rounded
        self.step = 0
        self.m = kernels.empty((stop - start,))
        self.v = kernels.empty((stop - start,))
        self.master = None
        self._start = start
        self._stop = stop
        self._decaying = [(low - start, high - start) for low, high in layout.decaying_ranges(start, stop)]

    def parameters_changed(self) -> None:
        """Learn that something else has changed the parameters."""
        self.master = None

    def moments(self) -> list[tuple[int, object, object]]:
        """Return [(start, m, v), ...], to save or fill; m and v begin at `start` of the flat buffer."""
        return [(self._start, self.m, self.v)]

    def update(self, parameters, gradients, lr: float, gradient_scale: float | None) -> None:
        """Update this range's parameters with its gradients times gradient_scale, both (stop - start,).

        On CPU cores, gradients may be gpt2.kernels.numpy.factors.FactoredGradients.
        gradient_scale None skips the step: nothing changes.
        """
        if gradient_scale is None:
            return
        self.step += 1
        s = self.settings
        parameters, master, rounding_seed = self._rounded_and_master(parameters)
        self.kernels.adamw(
            parameters, gradients, self.m, self.v, self._decaying,
            self.step, lr, s.beta1, s.beta2, s.eps, s.weight_decay, gradient_scale,
            master, self._start, rounding_seed,
        )  # fmt: skip

    def _rounded_and_master(self, parameters):
        """Return (parameters, master, rounding_seed) as the kernel takes them."""
        if self.rounded is not None:
            return self.rounded.target(self._start, self._stop), parameters, self.rounded.rounding_seed
        if self.master is None and parameters.itemsize < self.m.itemsize:
            self.master = parameters.astype(self.m.dtype)
        seed = self.settings.rounding_seed
        return parameters, self.master, None if seed is None else step_seed(seed, self.step)
