"""Memory that the ranks of a node share, and counters that tell the others when something is written there."""

import numpy as np

from dist.mpi import MPI
from dist.shared_memory import free_bytes, lack_of_room
from dist.waiting import Condition
from dist.world import World, end_with_one_line


class NodeMemory:
    """Arrays that all ranks of local_comm see; each rank makes one. Collective."""

    def __init__(self, local_comm):
        self._local_comm, self._local_rank, self._windows = local_comm, local_comm.rank, []
        # Only the first of 8 numbers is used: on its own cache line, a rank's writes do not slow down another's reads.
        self._counts = self.share(8, np.int64)

    def share(self, count: int, dtype=np.float32) -> list[np.ndarray]:
        """Return the zeroed arrays of all local ranks; this rank's has `count` elements. Collective."""
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

    def arrive(self) -> None:
        """Announce that this rank has written its part. Ranks that see it arrive see what it wrote before."""
        self._synchronize()
        self._counts[self._local_rank][0] += 1

    def arrived(self, local_ranks, count: int) -> Condition:
        """Return the condition that each of these local ranks has arrived `count` times since the start."""

        def holds():
            if any(self._counts[local_rank][0] < count for local_rank in local_ranks):
                return False
            self._synchronize()
            return True

        return Condition(holds)

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


def check_room(world: World, own_bytes: int, what: str, other: str = "") -> None:
    """End the job with one line if a node lacks the shared memory that its ranks are about to make.

    own_bytes: of this rank; the needs of a node's ranks add up. what, other: as in lack_of_room. Collective over the
    job. Without this check the allocation succeeds, and the first touch of a missing page kills the rank silently.
    """
    job = world.job
    needed, free, problem = job.local_comm.allreduce(own_bytes), free_bytes(), None
    if job.local_rank == 0 and free is not None and free < needed:
        problem = f"{job.host}: {lack_of_room(what, needed, free, other)}"
    if found := next(filter(None, job.comm.allgather(problem)), None):
        end_with_one_line(job.comm, found)
