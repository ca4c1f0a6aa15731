"""A rank that others wait for is named, with its host and phase, while the job hangs; and the job can be told to end.

Every rank has a thread that shows that the rank lives. Rank 0's thread also looks at all ranks' positions (live.py),
rank 1's does if rank 0 itself is what hangs. Where ranks have waited too long in an exchange, those are named that show
no life, or else those that have come the least far. A slow exchange, in which all ranks are, is nobody's fault.

The threads call no MPI but its abort.
"""

import os
import sys
import threading
import time
from dataclasses import dataclass

import numpy as np

from dist.abort import end_job
from dist.live import LEFT, LivePositions
from dist.world import World

LOOKS = 20  # while a rank may wait; but one every LONGEST_PAUSE_S at least
LONGEST_PAUSE_S = 3.0
SILENT_PAUSES = 4  # then the next rank takes over what a silent one did
NAMED_AT_MOST = 3


class Watchdog:
    """Made and closed by all ranks together; tell it of phases by `on_phase(name or None, step)`.

    folder: for the nodes to see each other, on a file system that they share. phases: all names; meetings: those in
    which ranks wait for each other. after_s: how long they may. ends_job: abort then, else print a line on stderr.
    """

    def __init__(self, world: World, folder, phases, meetings, after_s: float, ends_job: bool = False):
        self._world, self._names, self._after_s, self._ends_job = world, ("no phase", *phases), after_s, ends_job
        self._live = LivePositions(world, folder, phases, meetings)
        self.on_phase = self._live.enter
        self._pause_s = min(LONGEST_PAUSE_S, after_s / LOOKS)
        is_meeting = np.array([name in meetings for name in self._names])
        self._all = Observation(is_meeting, after_s, 2 * self._pause_s)
        self._node = Observation(is_meeting, SILENT_PAUSES * self._pause_s, 2 * self._pause_s)
        self._told = None
        if world.rank == 0 and self._live.unseen:
            print(f"{folder} is not shared with {', '.join(self._live.unseen)}: a stall there is not seen", flush=True)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching. Collective."""
        self._live.leave()
        self._stopped.set()
        self._thread.join()
        self._tell_the_end()
        self._live.close()

    def _watch(self) -> None:
        while not self._stopped.wait(self._pause_s):
            self._live.pulse()
            if self._world.node_count > 1 and self._world.local_rank < 2:
                self._publish()
            if self._world.rank < 2:
                self._look()

    def _publish(self) -> None:
        """For the node: its first rank does, or the second if the first shows no life."""
        positions = self._live.node_positions()
        self._node.look(positions, time.monotonic())
        if self._world.local_rank == 0 or self._node.is_silent(positions["rank"][0]):
            self._live.publish()

    def _look(self) -> None:
        self._all.look(self._live.read(), time.monotonic())
        if self._world.rank == 1 and not self._all.is_silent(0):
            return
        stall = self._all.find_stall()
        if stall and self._ends_job:
            end_job(self._world.comm, f"{self._tell(stall)}; the job ends, as --end-on-stall says\n")
        elif stall and not self._told:
            self._told = stall
            _say(f"{self._tell(stall)}; --end-on-stall ends such a job")
        elif not stall:
            self._tell_the_end()

    def _tell_the_end(self) -> None:
        if self._told:
            _say(f"{self._who(self._told.ranks)}: the stall is over")
            self._told = None

    def _who(self, ranks: list[int]) -> str:
        named = [f"rank {rank} on {self._world.places[rank]['host']}" for rank in ranks[:NAMED_AT_MOST]]
        more = f" and {len(ranks) - NAMED_AT_MOST} more" if len(ranks) > NAMED_AT_MOST else ""
        return ", ".join(named) + more

    def _tell(self, stall: "Stall") -> str:
        """ "rank 5 on cn03 has been in backward of step 17 for 62 s while 8 ranks wait in reduce: ..." """
        where = f"{self._names[stall.phase]} of step {stall.step}"
        if stall.is_silent:
            what = f"shows no sign of life for {stall.since_s:.0f} s, last seen in {where},"
            why = "stopped, swapped out, in a loop that holds Python's lock, or the host is gone; "
        else:
            what, why = f"has been in {where} for {stall.since_s:.0f} s", ""
        ranks = "1 rank waits" if stall.waiting == 1 else f"{stall.waiting} ranks wait"
        return (
            f"{self._who(stall.ranks)} {what} while {ranks} in {self._names[stall.waiting_phase]} for "
            f"{stall.waiting_s:.0f} s: {why}look there with py-spy dump --pid {stall.pid}, or gdb -p {stall.pid}"
        )


def _say(line: str) -> None:
    os.write(sys.stderr.fileno(), f"{line}\n".encode())  # whole, past the locks of the main thread's streams


@dataclass(frozen=True)
class Stall:
    """`ranks` hold the others up. step, phase, pid, since_s, is_silent: of the first of them; waiting: ranks, in
    waiting_phase, since waiting_s."""

    ranks: list[int]
    step: int
    phase: int
    pid: int
    since_s: float
    is_silent: bool
    waiting: int
    waiting_phase: int
    waiting_s: float


class Observation:
    """What one rank has seen of the others' positions, and for how long it has not changed.

    is_meeting: by phase number. after_s: longer is too long. longest_s: of the time between two looks no more counts,
    so that a job that was suspended as a whole, or a starved thread, accuses nobody.
    """

    def __init__(self, is_meeting: np.ndarray, after_s: float, longest_s: float):
        self._is_meeting, self._after_s, self._longest_s = is_meeting, after_s, longest_s
        self._positions = self._looked_at = None

    def look(self, positions: np.ndarray, now: float) -> None:
        """positions: (ranks,) POSITION, by rank. now: seconds. A rank that is not in it any more has not changed."""
        before = self._positions
        if before is None or len(np.setdiff1d(positions["rank"], before["rank"])):
            self._positions, self._looked_at = positions.copy(), now
            self._still_s, self._silent_s = np.zeros(len(positions)), np.zeros(len(positions))
            return
        at = np.searchsorted(before["rank"], positions["rank"])
        passed = min(now - self._looked_at, self._longest_s)
        self._still_s += passed
        self._silent_s += passed
        self._still_s[at[before["changes"][at] != positions["changes"]]] = 0
        self._silent_s[at[before["pulse"][at] != positions["pulse"]]] = 0
        self._positions[at], self._looked_at = positions, now

    def is_silent(self, rank: int) -> bool:
        return bool(self._silent()[self._positions["rank"] == rank].any())

    def find_stall(self) -> Stall | None:
        """Which ranks hold up others that have waited too long, if any do."""
        seen, silent = self._positions, self._silent()
        waits = self._is_meeting[seen["phase"]] & (self._still_s >= self._after_s) & (self._silent_s < self._after_s)
        waits &= seen["step"] < LEFT
        if not waits.any():
            return None
        # A step has fewer meetings than that; ranks in the same collective have the same number.
        progress = seen["step"] * (1 << 20) + seen["meetings"]
        behind = progress < progress[waits].max()
        # One that shows no life may have gone further than those that need its help.
        held_by = silent if silent.any() else behind & (progress == progress.min())
        if not held_by.any():
            return None
        first = int(np.argmax(held_by))
        furthest = int(np.argmax(np.where(waits, progress, -1)))
        since = self._silent_s if silent.any() else self._still_s
        return Stall(
            seen["rank"][held_by].tolist(), int(seen["step"][first]), int(seen["phase"][first]),
            int(seen["pid"][first]), float(since[first]), bool(silent.any()),
            int((waits & ~held_by).sum()), int(seen["phase"][furthest]), float(self._still_s[furthest]),
        )  # fmt: skip

    def _silent(self) -> np.ndarray:
        return (self._silent_s >= self._after_s) & (self._positions["step"] < LEFT)
