"""The current position of every rank, for threads that must not call MPI: one record per rank, in shared memory.

A rank writes its own record as it enters and leaves phases, so the record stays true when the rank hangs. Ranks of the
same node read it in the node's shared memory. Other nodes read it from a file, RUN/traces/node-00002.live: a copy of
the node's records, which its ranks rewrite every few seconds. No clocks are compared: a reader checks whether records
have changed since its last look.
"""

import os
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

from dist.mpi import MPI
from dist.probe.ports import Ports
from dist.waiting import barrier
from dist.world import World

FIELDS = (
    "run",  # a random number, to recognize files of earlier runs
    "rank",
    "pid",
    "pulse",  # counts up while the rank's threads run
    "changes",  # phases entered and left so far
    "step",
    "meetings",  # phases in which ranks meet, entered so far in this step
    "phase",  # 0 between phases, else counted from 1
    "moved",  # bytes through the node's ports so far; 0 on a single node
    "cut_off",  # 1 if one of these ports has lost its link; 0 on a single node
    "asked",  # 1 if SIGTERM has asked the rank to end
    "ends",  # 1 if the rank ends because a rank that it waits for is gone
)
POSITION = np.dtype([(name, "<i8") for name in FIELDS])
RUN, RANK, PID, PULSE, CHANGES, STEP, MEETINGS, PHASE, MOVED, CUT_OFF, ASKED, ENDS = range(len(POSITION))
LEFT = 1 << 40  # the step of a rank that has nothing more to do
SHARED_WITHIN_S = 1.0  # after this time, a file made on one node is visible on the others


def read_positions(path: Path) -> np.ndarray:
    """Return (ranks of a node,) POSITION from the file of any run; none if it cannot be read."""
    try:
        # Opened anew each time: only then does NFS ask the server whether the file has changed.
        data = path.read_bytes()
    except OSError:
        return np.empty(0, POSITION)
    return np.frombuffer(data[: len(data) // POSITION.itemsize * POSITION.itemsize], POSITION)


class LivePositions:
    """The ranks' records. Collective: all ranks make it together.

    phases: all names; meetings: phases in which ranks wait for each other. `unseen`: hosts whose records this rank
    cannot read, because `folder` is not on a file system that they share.
    """

    def __init__(self, world: World, folder, phases: tuple[str, ...], meetings: tuple[str, ...]):
        self._world = world
        self._folder = Path(folder)
        self._numbers = {None: 0} | {name: number for number, name in enumerate(phases, start=1)}
        self._is_meeting = {name: name in meetings for name in (None, *phases)}
        self._run = world.comm.bcast(int.from_bytes(os.urandom(6)))
        self._window = MPI.Win.Allocate_shared(POSITION.itemsize, 8, comm=world.local_comm)
        memory = [self._window.Shared_query(rank)[0] for rank in range(world.local_size)]
        self._node = [np.frombuffer(one, POSITION, 1) for one in memory]
        self._own = memoryview(memory[world.local_rank]).cast("B").cast("q")
        self._changes = self._step = self._meetings = 0
        self._node[world.local_rank][0] = (self._run, world.rank, os.getpid(), *[0] * (len(POSITION) - 3))
        self._ports = Ports() if world.node_count > 1 else None
        barrier(world.local_comm)
        if world.node_count > 1:
            with suppress(OSError):  # this node's records are not written, and `unseen` names it
                self._folder.mkdir(parents=True, exist_ok=True)
        self.unseen = self._find_unseen()

    def enter(self, phase: str | None, step: int) -> None:
        """Record that this rank enters a phase of a step, or leaves one (None). Takes 0.3 microseconds."""
        own = self._own
        if step != self._step:
            self._step = own[STEP] = step
            self._meetings = own[MEETINGS] = 0
        if self._is_meeting[phase]:
            self._meetings += 1
            own[MEETINGS] = self._meetings
        own[PHASE] = self._numbers[phase]
        self._changes += 1
        own[CHANGES] = self._changes

    def leave(self) -> None:
        """Record that this rank will not wait for other ranks again."""
        self._own[STEP] = LEFT

    def end(self) -> None:
        """Tell all other ranks that this rank ends, and that they must end."""
        self._own[ENDS] = 1
        if self._world.node_count > 1:
            self.publish()

    def pulse(self, is_asked: bool = False) -> None:
        """Show that this rank's threads run. is_asked: whether SIGTERM has asked the rank to end."""
        self._own[ASKED] = is_asked
        if self._ports:
            self._own[MOVED] = sum(self._ports.read())
            self._own[CUT_OFF] = self._ports.has_lost_link()
        self._own[PULSE] += 1

    def node_positions(self) -> np.ndarray:
        """Return (ranks of this node,) POSITION."""
        return np.concatenate(self._node)

    def publish(self) -> None:
        """Write this node's records for the other nodes."""
        try:
            file = os.open(self._path(self._world.node), os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.pwrite(file, self.node_positions().tobytes(), 0)
            finally:
                os.close(file)
        except OSError:
            pass  # a full or absent disk: the others see no further changes, and training goes on

    def read(self, others) -> np.ndarray:
        """Return (ranks,) POSITION, by rank, of this node and of the nodes in `others` that can be seen."""
        nodes = [self.node_positions(), *map(self._read, others)]
        seen = np.concatenate(nodes)
        return seen[np.unique(seen["rank"], return_index=True)[1]]

    def close(self) -> None:
        """Free the records. Collective over the node; no thread may use them any more."""
        barrier(self._world.local_comm)
        if self._world.local_rank == 0:
            with suppress(OSError):  # the folder may have become read-only or unavailable
                self._path(self._world.node).unlink(missing_ok=True)
                self._folder.rmdir()  # only if it is empty, because no step has been traced
        self._own = self._node = None
        self._window.Free()

    def _path(self, node: int) -> Path:
        return self._folder / f"node-{node:05d}.live"

    def _read(self, node: int) -> np.ndarray:
        """Return another node's records of this run; none without a file, or for this node (in memory)."""
        if node == self._world.node:
            return np.empty(0, POSITION)
        positions = read_positions(self._path(node))
        return positions[positions["run"] == self._run]

    def _find_unseen(self) -> list[str]:
        """Return the hosts whose records do not show up here within SHARED_WITHIN_S. Collective."""
        if self._world.node_count == 1:
            return []
        if self._world.local_rank == 0:
            self.publish()
        barrier(self._world.comm)
        patience = time.monotonic() + SHARED_WITHIN_S
        while len(seen := self.read(range(self._world.node_count))) < self._world.size and time.monotonic() < patience:
            time.sleep(0.05)
        hosts = [place["host"] for place in self._world.places if place["rank"] not in seen["rank"]]
        return list(dict.fromkeys(hosts))
