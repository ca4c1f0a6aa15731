"""The two flat buffers of a rank, parameters and gradients: its own memory, or memory that its node's ranks share."""

import numpy as np

from dist.mpi import MPI
from dist.shared_memory import free_bytes, lack_of_room
from dist.waiting import Condition, barrier
from dist.world import World, end_with_one_line


def host_zeros(length: int) -> np.ndarray:
    """Float32, in host memory."""
    return np.zeros(length, np.float32)


class OwnBuffers:
    """`parameters` and `gradients` of this rank alone: (size,) float32, zeroed.

    ranges: the [start, stop) that are used together; only buffers that do not hold all ranges at once look at them
    (sharded.py). zeros(length) makes the memory: the host's, or a GPU's (dist/gpu/buffers.py).
    """

    fills_parameters = True

    def __init__(self, world: World, size: int, ranges=(), zeros=host_zeros):
        self.parameters, self.gradients, self.zeros = zeros(size), zeros(size), zeros

    def filled(self, start: int, stop: int) -> None:
        """The first parameters of a range have been written."""

    def close(self) -> None:
        """Nothing is shared."""


class NodeBuffers:
    """One copy of the `parameters` for all ranks of a node, and a window on each other's `gradients`. Collective.

    local_gradients[i] are those of local rank i; the node's sum is made in local_gradients[0]. Only the leader fills in
    the first parameters. After that the strategy decides who writes what; `arrive` and `arrived` tell the others when.
    """

    def __init__(self, world: World, size: int, ranges=()):
        self.fills_parameters = world.local_rank == 0
        self._check_memory(world, size)
        self._windows = []
        local_comm = world.local_comm
        (self.parameters, *_) = self._share(local_comm, size if world.local_rank == 0 else 0, np.float32)
        self.local_gradients = self._share(local_comm, size, np.float32)
        self.gradients = self.local_gradients[world.local_rank]
        # Of 8 numbers only the first counts: on a cache line of its own, no rank's writes slow down another's reads.
        self._counts = self._share(local_comm, 8, np.int64)
        self._local_rank, self._local_comm = world.local_rank, local_comm
        barrier(local_comm)

    def filled(self, start: int, stop: int) -> None:
        """The first parameters of a range have been written."""

    def arrive(self) -> None:
        """Say that this rank has written its part. Whoever sees it arrive sees what it wrote before."""
        self._synchronize()
        self._counts[self._local_rank][0] += 1

    def arrived(self, local_ranks, count: int) -> Condition:
        """The condition that each of these local ranks has arrived `count` times, counted from the start."""

        def holds():
            if any(self._counts[local_rank][0] < count for local_rank in local_ranks):
                return False
            self._synchronize()
            return True

        return Condition(holds)

    def close(self) -> None:
        """Give the memory back; the arrays must not be used any more. Collective over the node."""
        self.parameters = self.gradients = self.local_gradients = self._counts = None
        for window in self._windows:
            window.Unlock_all()
            window.Free()
        self._windows = []

    def _share(self, local_comm, count: int, dtype) -> list[np.ndarray]:
        """The zeroed arrays of all local ranks, by local rank; this rank's holds `count` elements. Collective."""
        itemsize = np.dtype(dtype).itemsize
        window = MPI.Win.Allocate_shared(count * itemsize, itemsize, comm=local_comm)
        window.Lock_all()
        self._windows.append(window)
        counts = local_comm.allgather(count)
        arrays = [
            np.frombuffer(window.Shared_query(rank)[0], dtype, n) if n else np.zeros(0, dtype)
            for rank, n in enumerate(counts)
        ]
        arrays[local_comm.rank].fill(0)
        return arrays

    def _synchronize(self) -> None:
        for window in self._windows:
            window.Sync()

    @staticmethod
    def _check_memory(world: World, size: int) -> None:
        """End the job with one line where a node's shared memory cannot hold the buffers. Collective.

        The window would be made all the same; the first touch of a page that is not there kills a rank without a word.
        """
        needed, free = (world.local_size + 1) * size * 4, free_bytes()
        problem = None
        if world.local_rank == 0 and free is not None and free < needed:
            other = ", or use a strategy that shares none (ring, reduce-scatter)"
            problem = f"{world.host}: {lack_of_room('the buffers that its ranks share', needed, free, other)}"
        if found := next(filter(None, world.comm.allgather(problem)), None):
            end_with_one_line(world.comm, found)
