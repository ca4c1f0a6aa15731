"""What turns a range's gradients into an update: clipping by the global norm, the learning rate, and AdamW.

AdamW works on any flat range. Whoever updates a range makes an AdamW for it and holds the moments of that range only:
that is all that sharding the optimizer state takes.
"""

import math
import statistics
from collections import deque
from dataclasses import dataclass

from gpt2.parameters import Layout
from gpt2.rounding import RoundedParameters, step_seed

NORM_WINDOW = 128  # steps whose norms the next one is compared with, as in llm.c
SCHEDULES = ("cosine", "linear", "constant", "wsd")
DECAY_SHARE = 0.2  # wsd: the last fifth of the steps decays (Hu et al. 2024, MiniCPM; llm.c's default)


class Clipping:
    """Clips the global norm of the gradients, and skips steps whose norm stands out.

    max_norm: larger norms are brought down to it; 0 never clips. outlier_z: a step is skipped if its norm lies more
    than that many standard deviations above the mean of the last `window` norms (llm.c's -sg); 0 never skips. The rule
    begins when there are so many. `norms` holds them, all finite, and belongs to a run's state. `skips` says whether
    the last step was skipped. over_model(sum of squares): where several ranks share a model, the sum over all of them.
    """

    def __init__(self, max_norm: float, outlier_z: float = 0.0, window: int = NORM_WINDOW, over_model=float):
        self.max_norm, self.outlier_z, self._over_model = max_norm, outlier_z, over_model
        self.norms, self.skips = deque(maxlen=window), False

    def scale(self, sum_of_squares: float) -> tuple[float, float | None]:
        """(norm, factor for the gradients), or (norm, None) for a step to be skipped. Collective, with over_model."""
        norm, factor = clip_scale(self._over_model(sum_of_squares), self.max_norm)
        if self.outlier_z:
            self.skips = self._stands_out(norm)
            self.remember([norm])  # outliers, too: a norm that comes again and again is no outlier
        return norm, None if self.skips else factor

    def remember(self, norms) -> None:
        """Add norms, the newest last, such as those of a checkpoint. One that is not finite has no place among them: no
        deviation could be taken from it."""
        self.norms.extend(norm for norm in norms if math.isfinite(norm))

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


@dataclass(frozen=True)
class LearningRateSchedule:
    """`name` is one of SCHEDULES. The rate rises to `lr` in `warmup` steps, then falls to `min_lr` at step `steps`, and
    stays there in a run that is longer."""

    name: str
    lr: float
    min_lr: float
    warmup: int
    steps: int

    def at(self, step: int) -> float:
        """Learning rate of step 1, 2, ..."""
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
        """How many of the last steps lower the rate, if the warm-up is over by then."""
        match self.name:
            case "constant":
                return 0
            case "wsd":
                return max(1, round(DECAY_SHARE * self.steps))
        return max(1, self.steps - self.warmup)


@dataclass(frozen=True)
class AdamWSettings:
    """Hyperparameters that stay the same over a run. The learning rate comes with each step.

    stochastic_rounding: bfloat16 parameters are made of their master copy by rounding up or down at random, so that
    they equal it on average (gpt2/rounding.py). rounding_seed decides the draws. False rounds to nearest.
    """

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    stochastic_rounding: bool = False
    rounding_seed: int = 0


class AdamW:
    """AdamW for parameters [start, stop). Its moments `m` and `v` are (stop - start,), unscaled as in the kernel.

    float32 parameters are updated in place. bfloat16 parameters have too few bits to add up small steps, so they get a
    float32 copy, `master` (stop - start,), at the first update: the steps add up in it, and each writes the parameters
    anew, rounded. The result is the same however the parameters are sharded. `master` is None for float32 parameters.

    rounded: for a caller whose float32 parameters are themselves the master copy of a model's bfloat16 parameters. It
    holds the latter, and each update writes both.
    """

    def __init__(
        self, kernels, layout: Layout, start: int, stop: int, settings: AdamWSettings,
        rounded: RoundedParameters | None = None,
    ):  # fmt: skip
        self.kernels, self.settings, self.rounded = kernels, settings, rounded
        self.step, self._start, self._stop = 0, start, stop
        self.m, self.v = kernels.empty((stop - start,)), kernels.empty((stop - start,))
        self.master = None
        self._decaying = [(low - start, high - start) for low, high in layout.decaying_ranges(start, stop)]

    def moments(self) -> list[tuple[int, object, object]]:
        """[(start, m, v), ...], to be saved or filled; m and v begin at `start` of the flat buffer."""
        return [(self._start, self.m, self.v)]

    def update(self, parameters, gradients, lr: float, gradient_scale: float | None) -> None:
        """One step on this range's parameters from its gradients times gradient_scale, both (stop - start,).

        With gradient_scale None the step is skipped, and nothing changes.
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
        """(parameters, master, rounding_seed) as the kernel wants them."""
        if self.rounded is not None:
            return self.rounded.target(self._start, self._stop), parameters, self.rounded.rounding_seed
        if self.master is None and parameters.itemsize < self.m.itemsize:
            self.master = parameters.astype(self.m.dtype)
        s = self.settings
        return parameters, self.master, step_seed(s.rounding_seed, self.step) if s.stochastic_rounding else None
