"""The two flat buffers of a rank, parameters and gradients: its own memory, or memory that its node's ranks share."""

import mmap

import numpy as np

from dist.looked_up import LookedUp, ids_and_values
from dist.node_memory import NodeMemory, check_room
from dist.waiting import barrier
from dist.world import World


def host_zeros(length: int) -> np.ndarray:
    """(length,) float32 in host memory, on pages that no other array is on: a GPU's driver pins whole pages, each
    once."""
    item, pages = np.dtype(np.float32).itemsize, -(-length * 4 // mmap.PAGESIZE)
    memory = np.zeros((pages + 1) * mmap.PAGESIZE // item, np.float32)
    start = -memory.ctypes.data % mmap.PAGESIZE // item
    return memory[start : start + length]


class OwnBuffers:
    """`parameters` and `gradients` of this rank alone: (size,) float32, zeroed.

    ranges: the [start, stop) that are used together; only buffers that do not hold all ranges at once look at them
    (sharded.py). zeros(length) makes the memory: the host's, or a GPU's (dist/gpu/buffers.py).
    """

    fills_parameters = True

    def __init__(self, world: World, size: int, ranges=(), zeros=host_zeros):
        self.parameters, self.gradients, self.zeros = zeros(size), zeros(size), zeros

    def new_lookup(self, shape: tuple[int, int], most: int) -> LookedUp:
        """Make room for the sparse gradient of a table of this shape: at most `most` rows per step."""
        return LookedUp(shape, ids_and_values(most, shape[1], lambda count, dtype: [np.zeros(count, dtype)]))

    def filled(self, start: int, stop: int) -> None:
        """The first parameters of a range have been written."""

    def close(self) -> None:
        """Nothing is shared."""


class NodeBuffers(NodeMemory):
    """One copy of the `parameters` for all ranks of a node, and a window on each other's `gradients`. Collective.

    local_gradients[i] are those of local rank i; the node's sum is made in local_gradients[0]. Only the leader fills in
    the first parameters. After that the strategy decides who writes what; `arrive` and `arrived` tell the others when.
    Of a group of ranks (World.whole), all groups make theirs together.
    """

    def __init__(self, world: World, size: int, ranges=()):
        self.fills_parameters, self._world = world.local_rank == 0, world
        other = ", or use a strategy that shares none (ring, reduce-scatter)"
        vectors = 2 if self.fills_parameters else 1
        check_room(world, vectors * size * 4, "the buffers that its ranks share", other)
        super().__init__(world.local_comm)
        (self.parameters, *_) = self.share(size if self.fills_parameters else 0)
        self.local_gradients = self.share(size)
        self.gradients = self.local_gradients[world.local_rank]
        barrier(world.job.local_comm)

    def new_lookup(self, shape: tuple[int, int], most: int) -> LookedUp:
        """Make room as OwnBuffers does, in memory that the node's ranks share. Collective."""
        check_room(self._world, 4 * (most * shape[1] + 2 * (1 + most)), "gradients of looked-up rows")
        return LookedUp(shape, ids_and_values(most, shape[1], self.share), self._world.local_rank)

    def filled(self, start: int, stop: int) -> None:
        """The first parameters of a range have been written."""

    def close(self) -> None:
        """Give the memory back; the arrays must not be used any more. Collective over the node."""
        self.parameters = self.gradients = self.local_gradients = None
        super().close()
