"""The three backends: NumPy on CPU cores, CuPy with an exchange through host memory, CuPy with an exchange on the GPU.

A backend holds the arrays of a rank's model and of its strategy. Each has

    kernels, model                              the kernel set, and the flat arrays that the model computes with
    world, buffers, sum_of_squares,
    new_optimizer(start, stop)                  fields of the strategy's Job (strategies.base)
    new_strategy(job, step)                     the strategy as training calls it, after `step` completed steps
    host_parameters, fetch(start, stop)         parameters in host memory, filled before training; fetch copies a range
                                                into them for model.bin
    device, new_comm(world)                     for ranks that share a model (partners.py): the GPU, and a communicator
                                                for arrays on it; both may be None
    close()

All are collective, so that a GPU without enough memory ends the job with one line.
"""

from dataclasses import replace
from functools import partial

import numpy as np

from dist.gpu.buffers import DEVICE_BUFFERS, array_dtype
from dist.gpu.exchange import StreamExchange
from dist.gpu.staging import HostStaging
from dist.sharded import Slots
from dist.wire import WireFormat
from gpt2.errors import UserError
from gpt2.kernels import load_kernels
from gpt2.kernels.cupy.launch import round_parameters
from gpt2.optimizer import AdamW, AdamWSettings
from gpt2.rounding import RoundedParameters
from scripts.backends.transports import device_comm
from strategies import Strategy, find
from strategies.gpu.bridge import CastingBridge, FlatPair, HostBridge
from strategies.gpu.staged_adamw import StagedAdamW


class CpuBackend:
    """NumPy on CPU cores. Model and strategy share the arrays, in host memory."""

    device = None

    def __init__(self, settings, world, layout, adamw, wire_format, kernels):
        self.kernels = kernels
        self.world = world
        self.kind = find(settings.strategy)
        self.wire_format = wire_format
        self.operation = self.kind.traits.new_operation(wire_format)
        self.sum_of_squares = kernels.sum_of_squares
        self.new_optimizer = lambda start, stop: AdamW(kernels, layout, start, stop, adamw)
        options = {"replica": settings.replica} if "replica" in self.kind.traits.flags else {}
        self.buffers = self.kind.traits.buffers(world, layout.size, layout.held_ranges, **options)
        self.model = FlatPair(self.buffers.parameters, self.buffers.gradients)
        self.host_parameters = self.buffers.parameters

    def new_strategy(self, job, step: int):
        transport = self.kind.traits.in_host_memory(job.world, self.wire_format, self.operation.op)
        return self.kind(replace(job, **transport))

    def new_comm(self, world):
        """Return None: exchanges start in host memory."""

    def fetch(self, start: int, stop: int) -> None:
        """Do nothing: the parameters are in host memory."""

    def close(self) -> None:
        self.buffers.close()
        self.operation.close()


class StagedGpuBackend(CpuBackend):
    """CuPy. Model and AdamW's state are on the GPU, exchange buffers in host memory, with copies in between."""

    def __init__(self, settings, world, layout, adamw, wire_format, kernels, threads):
        super().__init__(settings, world, layout, adamw, wire_format, kernels)
        self.device = kernels.device
        self.sum_of_squares = load_kernels("numpy", threads).sum_of_squares  # the sums are in host memory
        with world.together(UserError):
            self.staging = HostStaging(kernels.device)
            zeros = partial(kernels.empty, dtype=array_dtype(settings.dtype))
            self.model = model_arrays(self.buffers, layout, zeros)
        self.rounded = rounded_parameters(self.model.parameters, kernels.device, adamw)
        self._optimizers = []
        # A strategy with local steps changes parameters after AdamW has rounded them.
        new_adamw = gpu_adamw(kernels, layout, adamw, None if self.kind.traits.takes_local_steps else self.rounded)
        self.new_optimizer = lambda start, stop: self._remember(StagedAdamW(new_adamw, self.staging, start, stop))

    def _remember(self, optimizer):
        self._optimizers.append(optimizer)
        return optimizer

    def new_strategy(self, job, step: int):
        strategy = super().new_strategy(job, step)  # collective, so allocate optimizers afterwards
        with self.world.together(UserError):
            for optimizer in self._optimizers:
                optimizer.allocate()
        if self.rounded is not None:
            self.rounded.step = step
        exchanged = FlatPair(job.buffers.parameters, job.buffers.gradients)
        return HostBridge(strategy, self.model, exchanged, job.tracer, self.rounded, self.staging)

    def close(self):
        self.staging.close()
        super().close()


class GpuBackend:
    """CuPy. Exchange buffers are on the GPU; in float32 they are the model's arrays."""

    def __init__(self, settings, world, layout, adamw, wire_format, kernels, comm):
        self.kernels = kernels
        self.world = replace(world, comm=comm)
        self.device = kernels.device
        self.kind = form_on_gpus(find(settings.strategy), settings.overlap)
        self.new_exchange = exchange_on_gpus(find(settings.strategy), wire_format)
        self.sum_of_squares = kernels.sum_of_squares
        self.together = world.together
        self.new_comm = partial(device_comm, settings.transport, device=self.device, overlap=False)
        with self.together(UserError):
            self.buffers = DEVICE_BUFFERS[self.kind.traits.buffers](self.device, world, layout.size, layout.held_ranges)
            self.model = FlatPair(self.buffers.parameters, self.buffers.gradients)
            if settings.dtype != "float32":
                self.model = model_arrays(
                    self.buffers, layout, partial(kernels.empty, dtype=array_dtype(settings.dtype))
                )
        self.rounded = rounded_parameters(self.model.parameters, self.device, adamw)
        self.new_optimizer = gpu_adamw(kernels, layout, adamw, self.rounded)
        self.host_parameters = self.buffers.host_parameters
        self.fetch = self.buffers.fetch
        self.close = self.buffers.close

    def new_strategy(self, job, step: int):
        job = replace(job, new_exchange=self.new_exchange)
        with self.together(UserError):
            strategy = self.kind(job)
        if self.rounded is None:
            return strategy
        self.rounded.step = step
        exchanged = FlatPair(self.buffers.parameters, self.buffers.gradients)
        return CastingBridge(strategy, self.model, exchanged, job.tracer, self.rounded)


def form_on_gpus(kind: type[Strategy], overlap: bool) -> type[Strategy]:
    """Return the class that runs a strategy on GPUs: the strategy itself, unless it declares another class."""
    return (overlap and kind.traits.on_gpus.overlapped) or kind.traits.on_gpus.form or kind


def exchange_on_gpus(kind: type[Strategy], wire_format: WireFormat):
    """Return a function of (comm, ranges) that makes the exchange on GPUs; None if the strategy calls comm itself."""
    moves = kind.traits.on_gpus.exchanges.get(wire_format.wire)
    return moves and partial(StreamExchange, moves, wire_format=wire_format)


def model_arrays(buffers, layout, zeros) -> FlatPair:
    """Return arrays for a model, separate from the exchange buffers. If layers share slots there, they do here."""
    return FlatPair(
        *(
            Slots(layout.held_ranges, zeros) if isinstance(flat, Slots) else zeros(flat.shape)
            for flat in (buffers.parameters, buffers.gradients)
        )
    )


def rounded_parameters(flat, device, adamw: AdamWSettings) -> RoundedParameters | None:
    """Return an object that rounds float32 parameters to the model's bfloat16; None for a float32 model."""
    if flat.dtype == np.float32:
        return None
    return RoundedParameters(flat, partial(round_parameters, device), adamw.rounding_seed)


def gpu_adamw(kernels, layout, adamw: AdamWSettings, rounded: RoundedParameters | None):
    """Return new_optimizer(start, stop) for a GPU. It also writes rounded parameters, unless layers share slots."""
    if rounded is not None and isinstance(rounded.flat, Slots):
        rounded = None
    return lambda start, stop: AdamW(kernels, layout, start, stop, adamw, rounded)
