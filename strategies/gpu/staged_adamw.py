"""AdamW on a GPU for parameters and gradients in host memory: each update copies chunks to the GPU and back."""

import numpy as np

from dist.gpu.staging import HostStaging, chunks
from dist.waiting import wait


class StagedAdamW:
    """gpt2.optimizer.AdamW of a range [start, stop) whose parameters and gradients lie in host memory.

    Moments and float32 masters stay on the GPU. Each update copies gradients to the GPU and parameters back in chunks:
    while one chunk is updated, the next is copied to the GPU and the last one back. new_adamw(start, stop) returns an
    AdamW on the GPU. Call allocate() before the first update.
    """

    def __init__(self, new_adamw, staging: HostStaging, start: int, stop: int):
        self._new_adamw = new_adamw
        self._staging = staging
        self._start = start
        self._chunks = chunks(stop - start)
        self._is_first = True
        self._step = 0
        self._optimizers = []

    def allocate(self) -> None:
        """Allocate the GPU memory; UserError if there is too little."""
        size = self._chunks[-1][1] if self._chunks else 0
        self._master = self._staging.device.empty((size,), np.float32)
        self._optimizers = [self._new_adamw(self._start + low, self._start + high) for low, high in self._chunks]

    @property
    def step(self) -> int:
        """Return the number of updates so far."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = step
        for optimizer in self._optimizers:
            optimizer.step = step

    def parameters_changed(self) -> None:
        """Learn that something else has changed the parameters: the next update copies them to the GPU."""
        self._is_first = True

    def moments(self) -> list:
        return [moments for optimizer in self._optimizers for moments in optimizer.moments()]

    def update(self, parameters, gradients, lr: float, gradient_scale: float | None) -> None:
        """Update as AdamW does. Only the first call, or the first after parameters_changed(), copies `parameters` to
        the GPU."""
        if gradient_scale is None:
            return
        staging = self._staging
        gradients = np.asarray(gradients)
        self._step += 1
        for array in (parameters, gradients):
            staging.pin(array)
        if self._is_first:
            staging.before_compute(staging.into(parameters, self._master))
            self._is_first = False
        updated = []
        down = None
        for index, ((low, high), optimizer) in enumerate(zip(self._chunks, self._optimizers, strict=True)):
            landing = staging.landings[index % 2][: high - low]
            staging.before_compute(staging.into(gradients[low:high], landing, updated[-2] if index > 1 else None))
            optimizer.update(self._master[low:high], landing, lr, gradient_scale)
            updated.append(staging.computed())
            down = staging.out(self._master[low:high], parameters[low:high])
        if down is not None:
            wait(down)
