"""The run folder's lock, as all ranks have it: rank 0 takes it, all nodes see it, and a job that loses it ends."""

import os
import threading
import time
from pathlib import Path

from dist.repeating import Repeating
from dist.waiting import barrier, gather_everywhere
from dist.world import USER_MISTAKE, end_job, end_with_one_line
from gpt2.errors import UserError
from scripts.training.lock_file import BEAT_S, LOCK, LockFile, own_lock, read_lock, take

SEEN_WITHIN_S = 10.0  # NFS may tell a node for so long that a new file is not there
PAUSE_S = 0.1


class RunLock:
    """A context: at its end the lock is given back, whatever has happened.

    `run`, once it is taken: the number of this start of the run, on every rank. supervisor: of the --restarts that made
    this start, "" for none.
    """

    def __init__(self, world, end=end_job, supervisor: str = ""):
        self._world, self._end, self._supervisor = world, end, supervisor
        self._file: LockFile | None = None  # rank 0's
        self._ending, self._thread = threading.Lock(), None
        self.run = None

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.release()

    def release(self) -> None:
        """Give the lock back, if this rank has it. A signal's handler may call it again meanwhile."""
        if self._thread:
            self._thread.stop()
        file, self._file = self._file, None
        if file:
            file.release()

    def take(self, folder: Path, anyway: bool) -> None:
        """Rank 0 makes the lock of the run folder, and all nodes look whether they see it. Collective.

        anyway: take it over from whoever holds it (--take-over). If it cannot be had, or a node does not see it, the
        job ends with one line.
        """
        problem = None
        try:
            if self._world.rank == 0:
                self._file = take(folder, own_lock(self._supervisor), anyway, self._world.print)
                self._thread = Repeating(self._beat, BEAT_S, "run lock")
        except UserError as error:
            problem = error
        barrier(self._world.comm)  # rank 0 may have waited for long: this leaves the cores to others
        with self._world.together(UserError):
            if problem:
                raise problem
        self.run = self._world.comm.bcast(self._file.lock.run if self._file else None)
        self._check_all_nodes_see_it(folder)

    def check(self) -> None:
        """End the job if the lock was lost. Rank 0 calls it before it writes what a later start would read, too."""
        if self._file and not self._file.is_own():
            self._lost()

    def _beat(self) -> None:
        if not self._file.beat():
            self._lost()

    def _lost(self) -> None:
        """Does not return: of the threads that come here the first ends the job, the others wait for that."""
        self._ending.acquire()
        path, world = self._file.path, self._world
        try:
            what = f"the run was taken over by {read_lock(path)}"
        except UserError:
            what = "it is gone, somebody removed it or the run folder"
        text = f"{path}: {what}: this job ends, and writes nothing more there"
        where = f"rank {world.rank} of {world.size} on {world.host}"
        self._end(world.comm, f"error: {text} ({where})\n", USER_MISTAKE)

    def _check_all_nodes_see_it(self, folder: Path) -> None:
        """Else their parts of a checkpoint would lie on disks of their own, and nobody could ever go on from them."""
        world = self._world
        if world.node_count == 1:
            return
        sees = world.local_rank > 0 or _sees(folder, self.run)
        seen = gather_everywhere(world.comm, sees)[:, 0]
        if blind := [place["host"] for place, sees in zip(world.places, seen, strict=True) if not sees]:
            end_with_one_line(
                world.comm,
                f"{folder / LOCK}: made by rank 0 on {world.places[0]['host']}, and not seen on {', '.join(blind)} "
                f"within {SEEN_WITHIN_S:g} s: expected an --out on a file system that all nodes share: choose another",
            )


def _sees(folder: Path, number: str) -> bool:
    """Whether the lock with this number of a run shows up in the folder."""
    begun = time.monotonic()
    while True:
        try:
            os.listdir(folder)  # has NFS ask the server for what is new in it
            if read_lock(folder / LOCK).run == number:
                return True
        except (OSError, UserError):
            pass
        if time.monotonic() - begun > SEEN_WITHIN_S:
            return False
        time.sleep(PAUSE_S)
