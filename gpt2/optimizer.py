"""AdamW on any flat range of the parameters.

Whoever updates a range makes an AdamW for it and holds the moments of that range only: sharding falls out of it.
"""

from dataclasses import dataclass

from gpt2.parameters import Layout
from gpt2.rounding import RoundedParameters, step_seed


@dataclass(frozen=True)
class AdamWSettings:
    """Hyperparameters that stay the same over a run; the learning rate comes with each step.

    stochastic_rounding: parameters that have a master copy are it rounded up or down at random, by rounding_seed, so
    that they are it on average (gpt2/rounding.py); otherwise to nearest.
    """

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    stochastic_rounding: bool = False
    rounding_seed: int = 0


class AdamW:
    """AdamW for parameters [start, stop), with its two moments `m`, `v` (stop - start,), unscaled as in the kernel.

    Parameters of fewer bits than the moments have a `master` copy of the moments' dtype, made at the first update: the
    steps add up in it, and the parameters are its values rounded, the same however the parameters are sharded. None
    otherwise. rounded: of float32 parameters that are the master copy of a model's bfloat16 ones, those: each update
    writes both.
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
        """[(start, m, v), ...]: where in the flat buffer the moments begin, and themselves, to be saved or filled."""
        return [(self._start, self.m, self.v)]

    def update(self, parameters, gradients, lr: float, gradient_scale: float | None) -> None:
        """One step on this range's parameters from its gradients times gradient_scale, both (stop - start,).

        None: the step is skipped, and nothing changes.
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
