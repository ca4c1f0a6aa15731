"""What a rank's model and strategy compute on, and how what they hold comes together.

Each of the three has: kernels, for the model, and model, its flat arrays; world, buffers, sum_of_squares and
new_optimizer(start, stop), for the strategy; new_strategy(job): it, as training calls it; host_parameters, which are
filled before training, and fetch(start, stop), which brings a range there for model.bin; close(). All are
collective, so that a GPU without enough memory ends the job in one line.
"""

from dataclasses import replace
from functools import partial

import numpy as np
from gpu_bridge import CastingBridge, FlatPair, HostBridge
from gpu_copies import Copies, StagedAdamW

from dist.device_buffers import DeviceBuffers
from dist.sharded import Slots
from gpt2.errors import UserError
from gpt2.kernels import load_kernels
from gpt2.optimizer import AdamW
from strategies import STRATEGIES


class OnCores:
    """NumPy: model and strategy share the arrays, in host memory."""

    def __init__(self, settings, world, layout, adamw, kernels):
        self.kernels, self.world, self.kind = kernels, world, STRATEGIES[settings.strategy]
        self.sum_of_squares = kernels.sum_of_squares
        self.new_optimizer = lambda start, stop: AdamW(kernels, layout, start, stop, adamw)
        self.buffers = self.kind.buffers(world, layout.size, layout.ranges)
        self.model = FlatPair(self.buffers.parameters, self.buffers.gradients)
        self.host_parameters = self.buffers.parameters

    def new_strategy(self, job):
        return self.kind(job)

    def fetch(self, start: int, stop: int) -> None:
        """They are there."""

    def close(self) -> None:
        self.buffers.close()


class OnGpuThroughHost(OnCores):
    """CuPy: exchange buffers as OnCores has them; model and AdamW's state on the GPU, copies in between."""

    def __init__(self, settings, world, layout, adamw, kernels, threads):
        super().__init__(settings, world, layout, adamw, kernels)
        self.sum_of_squares = load_kernels("numpy", threads).sum_of_squares  # the sums are in host memory
        self._optimizers, new_adamw = [], self.new_optimizer
        self.new_optimizer = lambda start, stop: self._remember(StagedAdamW(new_adamw, self.copies, start, stop))
        with world.together(UserError):
            self.copies = Copies(kernels.device)
            zeros = partial(kernels.empty, dtype=array_dtype(settings.dtype))
            self.model = FlatPair(
                *(
                    Slots(layout.ranges, zeros) if isinstance(flat, Slots) else zeros(flat.shape)
                    for flat in (self.buffers.parameters, self.buffers.gradients)
                )
            )

    def _remember(self, optimizer):
        self._optimizers.append(optimizer)
        return optimizer

    def new_strategy(self, job):
        strategy = self.kind(job)  # speaks with other ranks, so the optimizers it makes wait with what may fail
        with self.world.together(UserError):
            for optimizer in self._optimizers:
                optimizer.allocate()
        return HostBridge(strategy, self.model, FlatPair(job.buffers.parameters, job.buffers.gradients), job.tracer,
                          self.copies)  # fmt: skip

    def close(self):
        self.copies.close()
        super().close()


class OnGpu:
    """CuPy, and exchange buffers on the GPU: in float32 they are the model's arrays."""

    def __init__(self, settings, world, layout, adamw, kernels, comm):
        self.kernels, self.world, self.kind = kernels, replace(world, comm=comm), STRATEGIES[settings.strategy]
        self.sum_of_squares, self.together = kernels.sum_of_squares, world.together
        self.new_optimizer = lambda start, stop: AdamW(kernels, layout, start, stop, adamw)
        with self.together(UserError):
            self.buffers = DeviceBuffers(kernels.device, layout.size)
            self.model = FlatPair(self.buffers.parameters, self.buffers.gradients)
            if settings.dtype != "float32":
                shape, dtype = (layout.size,), array_dtype(settings.dtype)
                self.model = FlatPair(kernels.empty(shape, dtype), kernels.empty(shape, dtype))
        self.host_parameters, self.fetch, self.close = (
            self.buffers.host_parameters, self.buffers.fetch, self.buffers.close,
        )  # fmt: skip

    def new_strategy(self, job):
        with self.together(UserError):
            strategy = self.kind(job)
        if self.model.parameters is self.buffers.parameters:
            return strategy
        exchanged = FlatPair(self.buffers.parameters, self.buffers.gradients)
        return CastingBridge(strategy, self.model, exchanged, job.tracer)


def array_dtype(name: str) -> np.dtype:
    """What CuPy calls float32 or bfloat16."""
    if name == "float32":
        return np.dtype(np.float32)
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)
