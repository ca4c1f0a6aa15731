"""The run folder's lock, shared by all ranks: rank 0 takes it, all nodes see it, and a job that loses it ends."""

import os
import threading
import time
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from dist.console import USER_MISTAKE
from dist.repeating import Repeating
from dist.waiting import barrier, gather_everywhere
from dist.world import end_job, end_with_one_line
from gpt2.errors import UserError
from scripts.training.lock_file import BEAT_S, LOCK, PAUSE_S, LockFile, look, own_lock, take

SEEN_WITHIN_S = 10.0  # NFS may hide a new file from other nodes for this long


class RunLock(AbstractContextManager):
    """A context that releases the lock at its end, also after an error.

    run: the number of this start, on every rank, once the lock is taken. supervisor: the number of the --restarts
    process that made this start, or "".
    """

    def __init__(self, world, end=end_job, supervisor: str = ""):
        self.run = None
        self._world = world
        self._end = end
        self._supervisor = supervisor
        self._file: LockFile | None = None  # rank 0's
        self._heartbeat = None
        self._ending = threading.Lock()

    def __exit__(self, *error):
        self.release()

    def release(self) -> None:
        """Release the lock if this rank has it. A signal handler may interrupt this and call it again."""
        if self._heartbeat:
            self._heartbeat.stop()
        file = self._file
        self._file = None
        if file:
            file.release()

    def take(self, folder: Path, anyway: bool) -> None:
        """Take the lock of the run folder on rank 0 and check that all nodes see it. Collective.

        anyway: take the lock over from its holder (--take-over). If that fails, or a node does not see the lock, the
        job ends with one line.
        """
        with self._world.together(UserError):
            try:
                if self._world.rank == 0:
                    self._file = take(folder, own_lock(self._supervisor), anyway, self._world.print)
                    self._heartbeat = Repeating(self._beat, BEAT_S, "run lock")
            finally:
                barrier(self._world.comm)  # sleeps while rank 0 watches another holder
        self.run = self._world.comm.bcast(self._file.lock.run if self._file else None)
        if self._world.node_count > 1:
            self._check_all_nodes_see_it(folder)

    def check(self) -> None:
        """End the job if the lock is lost. Rank 0 calls this before it writes anything that a later start reads."""
        file = self._file
        if file is None or file.is_own():
            return
        self._ending.acquire()  # never released: the first thread ends the job while others wait here
        what = "it is gone, somebody removed it or the run folder"
        with suppress(UserError):
            if seen := look(file.path):
                what = f"the run was taken over by {seen}"
        where = f"rank 0 of {self._world.size} on {self._world.host}"
        text = f"error: {file.path}: {what}: this job ends, and writes nothing more there ({where})\n"
        self._end(self._world.comm, text, USER_MISTAKE)

    def _beat(self) -> None:
        self.check()
        with suppress(OSError):  # the disk may be full or unreachable for a while
            os.utime(self._file.path)

    def _check_all_nodes_see_it(self, folder: Path) -> None:
        """End the job if a node does not see the lock: that node would write its checkpoint parts to a local disk."""
        world = self._world
        seen = gather_everywhere(world.comm, world.local_rank > 0 or _sees(folder, self.run))[:, 0]
        if blind := [place["host"] for place, sees in zip(world.places, seen, strict=True) if not sees]:
            end_with_one_line(
                world.comm,
                f"{folder / LOCK}: made by rank 0 on {world.places[0]['host']}, and not seen on {', '.join(blind)} "
                f"within {SEEN_WITHIN_S:g} s: expected an --out on a file system that all nodes share: choose another",
            )


def _sees(folder: Path, run: str) -> bool:
    """Return whether the lock of this start shows up in the folder within SEEN_WITHIN_S."""
    end = time.monotonic() + SEEN_WITHIN_S
    while time.monotonic() < end:
        with suppress(OSError, UserError):
            os.listdir(folder)  # makes NFS ask the server for new files
            if (seen := look(folder / LOCK)) and seen.run == run:
                return True
        time.sleep(PAUSE_S)
    return False
