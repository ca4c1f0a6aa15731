"""A rank's two flat buffers, parameters and gradients, in its own memory or in memory that its node's ranks share."""

import numpy as np

from dist.node_memory import NodeMemory, check_room, host_zeros
from dist.sparse_gradient import SparseGradient
from dist.waiting import barrier
from dist.world import World, world_of


class OwnBuffers:
    """`parameters` and `gradients` of this rank alone: (size,) float32, zeroed.

    ranges: the [start, stop) that are used together; needed only by buffers that do not hold all ranges at once
    (sharded.py). zeros(length): allocates host memory, or GPU memory (dist/gpu/buffers.py).
    """

    fills_parameters = True

    def __init__(self, world: World, size: int, ranges=(), zeros=host_zeros):
        self.parameters = zeros(size)
        self.gradients = zeros(size)
        self.zeros = zeros

    def new_sparse_gradient(self, shape: tuple[int, int], most: int) -> SparseGradient:
        """Return a SparseGradient for at most `most` rows that a step looks up in a table of that shape."""
        return SparseGradient(shape, most, lambda count, dtype: [np.zeros(count, dtype)])

    def filled(self, start: int, stop: int) -> None:
        """Do nothing: the first parameters of a range have been written."""

    def close(self) -> None:
        """Do nothing: no memory is shared."""


class NodeBuffers(NodeMemory):
    """`parameters` that all ranks of a node share, and access to each other's `gradients`. Collective.

    local_gradients[i] belongs to local rank i; local_gradients[0] also takes the node's sum. Only the leader writes the
    initial parameters. After that the strategy decides which rank writes what; `arrive` and `arrived` tell when.
    """

    def __init__(self, world: World, size: int, ranges=()):
        self.fills_parameters = world.local_rank == 0
        self._world = world
        other = ", or use a strategy that shares none (ring, reduce-scatter)"
        vectors = 2 if self.fills_parameters else 1
        check_room(world, vectors * size * 4, "the buffers that its ranks share", other)
        super().__init__(world.local_comm)
        self.parameters = self.share(size if self.fills_parameters else 0)[0]
        self.local_gradients = self.share(size)
        self.gradients = self.local_gradients[world.local_rank]
        barrier(world.job.local_comm)

    def new_sparse_gradient(self, shape: tuple[int, int], most: int) -> SparseGradient:
        """Return a SparseGradient whose rows all ranks of the node can read. Collective."""
        check_room(self._world, 4 * (most * shape[1] + 2 * (1 + most)), "gradients of looked-up rows")
        return SparseGradient(shape, most, self.share, self._world.local_rank)

    def filled(self, start: int, stop: int) -> None:
        """Do nothing: the first parameters of a range have been written."""

    def close(self) -> None:
        """Free the memory; the arrays must not be used any more. Collective over the node."""
        self.parameters = self.gradients = self.local_gradients = None
        super().close()


class ReplicaBuffers(NodeBuffers):
    """NodeBuffers of the ranks that train one replica of the model: `world` is theirs. Collective.

    replica: "node" for all ranks of the node, "rank" for each rank alone.
    """

    def __init__(self, world: World, size: int, ranges=(), replica: str = "node"):
        comm = world.local_comm.Split(world.local_rank if replica == "rank" else 0, world.local_rank)
        self.world = world_of(comm, comm, whole=world.job)
        super().__init__(self.world, size)

    def close(self) -> None:
        """Free the memory and the replica's communicator. Collective over the node."""
        super().close()
        self.world.comm.Free()
