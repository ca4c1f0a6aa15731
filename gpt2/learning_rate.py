"""The learning rate over the steps: cosine, linear, constant or wsd, each after a linear warm-up."""

import math
from dataclasses import dataclass

SCHEDULES = ("cosine", "linear", "constant", "wsd")
DECAY_SHARE = 0.2  # wsd: the last fifth of the steps decays (Hu et al. 2024, MiniCPM; llm.c's default)


@dataclass(frozen=True)
class Schedule:
    """`name` of SCHEDULES; up to `lr` over `warmup` steps, then down to `min_lr` at the last of `steps`."""

    name: str
    lr: float
    min_lr: float
    warmup: int
    steps: int

    def at(self, step: int) -> float:
        """Learning rate of step 1, 2, ... steps."""
        if step <= self.warmup:
            return self.lr * step / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        match self.name:
            case "cosine":
                left = 0.5 * (1.0 + math.cos(math.pi * done))
            case "linear":
                left = 1.0 - done
            case "constant":
                left = 1.0
            case "wsd":
                decay_steps = max(1, round(DECAY_SHARE * self.steps))
                left = 1.0 - math.sqrt(max(0.0, 1.0 - (self.steps - step) / decay_steps))
        return self.min_lr + left * (self.lr - self.min_lr)
