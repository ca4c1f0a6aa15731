"""Memory that the ranks of a node share, and counters that announce what has been written there."""

import mmap
from collections.abc import Iterator

import numpy as np

from dist.mpi import MPI
from dist.progress_engine import ProgressEngine
from dist.shared_memory import free_bytes, lack_of_room
from dist.waiting import Condition
from dist.world import World, end_with_one_line


def host_zeros(length: int, dtype=np.float32) -> np.ndarray:
    """Return (length,) zeros in host memory, on pages of their own: a GPU's driver pins whole pages, each only once."""
    itemsize = np.dtype(dtype).itemsize
    page = mmap.PAGESIZE // itemsize  # elements
    memory = np.zeros((-(-length // page) + 1) * page, dtype)
    start = -memory.ctypes.data % mmap.PAGESIZE // itemsize
    return memory[start : start + length]


class NodeMemory:
    """Arrays, one from each rank of local_comm (`local_ranks`), that all these ranks can access. Collective."""

    def __init__(self, local_comm):
        self._local_comm = local_comm
        self._local_rank = local_comm.rank
        self.local_ranks = range(local_comm.size)
        self._windows = []
        # Of 8 numbers only the first is used: with a cache line for each counter, ranks do not slow each other down.
        self._counts = self.share(8, np.int64)

    def share(self, count: int, dtype=np.float32) -> list[np.ndarray]:
        """Return the zeroed arrays of all local ranks; this rank's has `count` elements. Collective."""
        if self._local_comm.size == 1:  # private memory may have huge pages, which shared memory rarely gets
            return [host_zeros(count, dtype)]
        itemsize = np.dtype(dtype).itemsize
        window = MPI.Win.Allocate_shared(count * itemsize, itemsize, comm=self._local_comm)
        window.Lock_all()
        self._windows.append(window)
        counts = self._local_comm.allgather(count)
        arrays = [
            np.frombuffer(window.Shared_query(rank)[0], dtype, n) if n else np.zeros(0, dtype)
            for rank, n in enumerate(counts)
        ]
        arrays[self._local_rank].fill(0)
        return arrays

    def arrive(self) -> int:
        """Announce that this rank has written its part; return how often it has arrived by now.

        Ranks that see the arrival also see all earlier writes of this rank.
        """
        self._synchronize()
        self._counts[self._local_rank][0] += 1
        return self.arrivals

    @property
    def arrivals(self) -> int:
        """How often this rank has arrived."""
        return int(self._counts[self._local_rank][0])

    def arrived(self, local_ranks, count: int) -> Condition:
        """Return the condition that each of these local ranks has arrived `count` times since the start."""

        def holds():
            if any(self._counts[local_rank][0] < count for local_rank in local_ranks):
                return False
            self._synchronize()
            return True

        return Condition(holds)

    def meet(self) -> Condition:
        """Arrive, and return the condition that all ranks of the node have arrived as often."""
        return self.arrived(self.local_ranks, self.arrive())

    def close(self) -> None:
        """Free the memory; the arrays must not be used any more. Collective over the node."""
        self._counts = None
        for window in self._windows:
            window.Unlock_all()
            window.Free()
        self._windows = []

    def _synchronize(self) -> None:
        for window in self._windows:
            window.Sync()


class NodeGathers:
    """All-gathers by the rails of a node for all its ranks, which see the gathers end in order.

    Each local rank arrives when it starts its gathers, and again as each of them ends. So `started + k` arrivals of all
    rails mean that k gathers have ended. engine: advances the gathers. rails: the local ranks that gather; the others
    only arrive. count: gathers per start.
    """

    def __init__(self, node: NodeMemory, engine: ProgressEngine, rails: range, count: int):
        self.count = count
        self.started = -count  # arrivals at the last start; before the first, there is nothing to wait for
        self._node = node
        self._engine = engine
        self._rails = rails
        self._awaited = 0  # arrivals that this rank has waited for

    def start(self, gathers: list[Iterator]) -> None:
        """Start this rank's `count` gathers, or none on a rank without a rail. All earlier ones have been awaited."""
        self.started = self._node.arrive()
        for turn, gather in enumerate(gathers, self.started):
            self._engine.start(self._in_turn(gather, turn))
        for _ in range(self.count - len(gathers)):
            self._node.arrive()

    def are_awaited(self, count: int) -> bool:
        """Return whether this rank has waited for the first `count` gathers."""
        return self.started + count <= self._awaited

    def wait(self, count: int) -> None:
        """Wait until the first `count` gathers of all rails have ended; later gathers advance meanwhile."""
        self._awaited = self.started + count
        self._engine.wait(self._node.arrived(self._rails, self._awaited))

    def _in_turn(self, gather: Iterator, turn: int) -> Iterator:
        """Gather when all local ranks have started, and arrive after `turn` arrivals."""
        yield self._node.arrived(self._node.local_ranks, self.started)
        yield from gather
        yield Condition(lambda: self._node.arrivals == turn)  # several are under way and may end in any order
        self._node.arrive()


def check_room(world: World, own_bytes: int, what: str, other: str = "") -> None:
    """End the job with one line if a node lacks the shared memory that its ranks are about to allocate. Collective.

    own_bytes: needed by this rank; the needs of a node's ranks add up. what, other: as in lack_of_room. Without this
    check the allocation succeeds, and the first access to a missing page kills the rank silently.
    """
    job = world.job
    needed = job.local_comm.allreduce(own_bytes if world.local_size > 1 else 0)
    free = free_bytes()
    problem = None
    if job.local_rank == 0 and free is not None and free < needed:
        problem = f"{job.host}: {lack_of_room(what, needed, free, other)}"
    if found := next(filter(None, job.comm.allgather(problem)), None):
        end_with_one_line(job.comm, found)
