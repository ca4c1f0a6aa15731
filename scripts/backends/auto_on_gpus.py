"""--strategy auto between GPUs: a short trial of each strategy that may be the fastest there picks one.

What the links inside a node carry, and what NCCL makes of a call, the cost model does not know, so it is not asked.
"""

from dataclasses import replace
from functools import partial

import numpy as np

from dist.buffers import OwnBuffers
from dist.gpu.buffers import device_zeros
from dist.world import World
from scripts.exchange_bench.contenders import JUNK, Contender, CopyingAtOnce, copying_job
from scripts.exchange_bench.rounds import measured_seconds
from scripts.exchange_bench.values import fill, is_filled
from strategies import DEVICE_FORMS

# Rooted calls and trees send more than these (NCCL's own all-reduce takes trees where they are faster), and what
# changes what a rank holds is chosen for memory, by name.
CANDIDATES = ("reduce-scatter", "allreduce", "ring", "hierarchical", "hierarchical-sharded")
KNOW_NODES = ("hierarchical", "hierarchical-sharded")
TRIAL_BYTES, REPEAT = 64 << 20, 3


class DeviceContender(Contender):
    """A strategy's form on GPUs, over a DeviceComm. own_buffers: on the GPU."""

    def __init__(self, world: World, own_buffers: OwnBuffers, name: str, comm, wire: str):
        super().__init__(world, own_buffers)
        form, self.device = DEVICE_FORMS[name], comm.device
        self.on_host = np.empty(len(own_buffers.gradients), np.float32)
        options = {"wire": wire, "new_exchange": form.exchanges[wire]}
        places = replace(world, comm=comm)
        self.strategy = form.kind(
            copying_job(places, own_buffers, len(self.on_host), lambda start, stop: CopyingAtOnce(), **options)
        )

    def prepare(self):
        fill(self.on_host, self.values)
        self.buffers.gradients.set(self.on_host)
        self.buffers.parameters.fill(JUNK)
        self.device.synchronize()

    def exchange(self):
        size = len(self.on_host)
        self.strategy.gradients_final(0, size)
        self.strategy.update(1.0)
        self.strategy.before_use(0, size)
        self.device.synchronize()

    def is_correct(self):
        return is_filled(self.device.download(self.buffers.parameters), self.sums)


def choose_on_gpus(world: World, settings, size: int, comm) -> tuple[str, str]:
    """(name, why) for vectors of `size` elements, exchanged over comm. Collective."""
    trial_size = -(-min(size, TRIAL_BYTES // 4) // world.size) * world.size
    buffers = OwnBuffers(world, trial_size, zeros=partial(device_zeros, comm.device))
    contenders = {
        name: DeviceContender(world, buffers, name, comm, settings.wire) for name in candidates(world, settings.wire)
    }
    seconds = measured_seconds(world, contenders, REPEAT)
    tried = ", ".join(f"{name} {taken * 1e3:.1f} ms" for name, taken in seconds.items())
    why = f"of {trial_size * 4 / 1e6:.1f} MB in a trial between GPUs, which the cost model does not know: {tried}"
    return min(seconds, key=seconds.get), why


def candidates(world: World, wire: str) -> list[str]:
    """Those with an exchange for this wire; those that know nodes where there are some, of several ranks."""
    names = CANDIDATES if 1 < world.node_count < world.size else [n for n in CANDIDATES if n not in KNOW_NODES]
    return [name for name in names if wire in DEVICE_FORMS[name].exchanges]
