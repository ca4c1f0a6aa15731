"""AdamW on any flat range of the parameters, and clipping by the global norm.

Whoever updates a range makes an AdamW for it and holds the moments of that range only: sharding falls out of it.
"""

import math
from dataclasses import dataclass

from gpt2.parameters import Layout


@dataclass(frozen=True)
class AdamWSettings:
    """Hyperparameters that stay the same over a run; the learning rate comes with each step."""

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1


class AdamW:
    """AdamW for parameters [start, stop), with its two moments `m`, `v` (stop - start,), unscaled as in the kernel.

    Parameters of fewer bits than the moments have a `master` copy of the moments' dtype, made at the first update: the
    steps add up in it, and the parameters are its values rounded. None otherwise.
    """

    def __init__(self, kernels, layout: Layout, start: int, stop: int, settings: AdamWSettings):
        self.kernels, self.settings = kernels, settings
        self.step = 0
        self.m, self.v = kernels.empty((stop - start,)), kernels.empty((stop - start,))
        self.master = None
        self._decaying = [(low - start, high - start) for low, high in layout.decaying_ranges(start, stop)]

    def update(self, parameters, gradients, lr: float, gradient_scale: float) -> None:
        """One step on this range's parameters from its gradients times gradient_scale, both (stop - start,)."""
        self.step += 1
        s = self.settings
        if self.master is None and parameters.itemsize < self.m.itemsize:
            self.master = parameters.astype(self.m.dtype)
        self.kernels.adamw(
            parameters if self.master is None else self.master, gradients, self.m, self.v, self._decaying,
            self.step, lr, s.beta1, s.beta2, s.eps, s.weight_decay, gradient_scale,
        )  # fmt: skip
        if self.master is not None:
            parameters[:] = self.master


def clip_scale(sum_of_squares: float, max_norm: float) -> tuple[float, float]:
    """(norm, factor for the gradients): the factor brings a norm above max_norm down to it; max_norm 0 never clips."""
    norm = math.sqrt(sum_of_squares)
    return norm, max_norm / norm if 0.0 < max_norm < norm else 1.0
