"""Find the ranks that hold up the others, or a network that stands still, from the ranks' positions (live.py).

The watchdog (watchdog.py) passes in the positions it sees, with the time of its own clock.

If a rank has died, `srun --kill-on-bad-exit` sends SIGTERM to the remaining ranks, and SIGKILL only after SLURM's
KillWait, 30 s by default. Training answers SIGTERM with a checkpoint, for which all ranks must meet. Ranks that wait in
MPI for the dead rank never return, and Python's signal handler does not run there. But their watchdog threads run. A
rank is gone if it shows no sign of life and no SIGTERM, while all others have received SIGTERM and wait. One rank
concludes that, names the gone rank, marks its own record, and ends. The others see the mark, and end.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dist.watch.live import LEFT, LivePositions
from dist.world import World

# Bytes/s through a node's ports. The system and the watchdogs send less than this; an exchange sends more.
STANDING_BYTES_S = 1e5
MOST_MEETINGS = 1 << 20  # a step has fewer, so step and meetings combine into one growing number


@dataclass(frozen=True)
class Stall:
    """The ranks that hold up others, and those that wait."""

    ranks: list[int]  # hold up the others; [] if all ranks wait and the network stands still
    # Of the first of these ranks:
    step: int
    phase: int  # its number, as in live.FIELDS
    pid: int
    since_s: float  # seconds without a change; if it is silent, without a sign of life
    is_silent: bool
    is_cut_off: bool  # its node's port has lost its link
    # Of those that wait:
    waiting: int  # how many
    waiting_phase: int
    waiting_s: float


class Observation:
    """The ranks' positions as one rank sees them, and for how long each has not changed.

    is_meeting, is_wait: by phase number, whether all ranks wait for each other in a phase, or for some others, such as
    another pipeline stage. after_s: a longer wait is too long. longest_s: a longer time between two looks counts as
    this, so no rank is accused after the whole job was suspended.
    """

    def __init__(self, is_meeting: np.ndarray, after_s: float, longest_s: float, is_wait: np.ndarray | None = None):
        self._is_meeting = is_meeting
        self._after_s = after_s
        self._longest_s = longest_s
        self._is_wait = np.zeros_like(is_meeting) if is_wait is None else is_wait
        self._positions = self._looked_at = None

    def look(self, positions: np.ndarray, now: float) -> None:
        """Take in the positions, (ranks,) POSITION by rank, at `now` in seconds. A missing rank has not changed."""
        before = self._positions
        if before is None or len(np.setdiff1d(positions["rank"], before["rank"])):
            self._positions = positions.copy()
            self._looked_at = now
            self._still_s, self._silent_s, self._unmoved_s = np.zeros((3, len(positions)))
            self._has_moved = np.zeros(len(positions), bool)
            return
        at = np.searchsorted(before["rank"], positions["rank"])
        passed = min(now - self._looked_at, self._longest_s)
        self._still_s += passed
        self._silent_s += passed
        self._still_s[at[before["changes"][at] != positions["changes"]]] = 0
        self._silent_s[at[before["pulse"][at] != positions["pulse"]]] = 0
        self._unmoved_s += passed
        moving = at[positions["moved"] - before["moved"][at] > STANDING_BYTES_S * passed]
        self._unmoved_s[moving] = 0
        self._has_moved[moving] = True
        self._positions[at] = positions
        self._looked_at = now

    def are_silent(self, ranks) -> bool:
        """Return whether all of these ranks have shown no life for too long."""
        return set(ranks) <= set(self._positions["rank"][self._silent()])

    def has_end(self) -> bool:
        """Return whether a rank ends because a rank that it waits for is gone."""
        return bool(self._positions["ends"].any())

    def find_stall(self) -> Stall | None:
        """Return the Stall of ranks that hold up others which have waited too long, or None."""
        seen = self._positions
        silent = self._silent()
        waits = self._waits() & ~silent
        if not waits.any():
            return None
        # Ranks that are in the same collective have the same number.
        progress = seen["step"] * MOST_MEETINGS + seen["meetings"]
        cut_off = (seen["cut_off"] != 0) & (seen["step"] < LEFT)
        # A rank that shows no life, or cannot be reached, may be further than those that wait for it: its last record
        # may be old, and its messages may be stuck. So it is named first, whatever its progress seems to be.
        held_by = next((mask for mask in (silent, cut_off) if mask.any()), self._standing(progress, waits))
        if not held_by.any():
            return None
        furthest = int(np.argmax(np.where(waits, progress, -1)))
        return self._stall(held_by, int(np.argmax(held_by)), waits & ~held_by, furthest)

    def find_gone(self) -> list[int]:
        """Return the ranks that show no life and no SIGTERM, if all others have received it, and wait."""
        seen = self._positions
        gone = self._silent() & (seen["asked"] == 0)
        left = ~gone & (seen["step"] < LEFT)
        is_certain = left.any() and seen["asked"][left].all() and self._waits()[left].all()
        return seen["rank"][gone].tolist() if is_certain else []

    def _standing(self, progress: np.ndarray, waits: np.ndarray) -> np.ndarray:
        """Return (ranks,) bool: the ranks that hold up the waiting ranks: they have come the least far and do not move.

        If there are none, and some ranks wait only for some others: ranks that wait for nobody, do not move, and have
        come no further than the furthest of those.
        """
        phase = self._positions["phase"]
        still = (self._still_s >= self._after_s) & ~self._is_wait[phase]
        behind = progress < progress[waits].max()
        stuck = behind & (progress == progress.min()) & still
        if not self._is_wait.any():
            return stuck
        furthest = np.where(waits & self._is_wait[phase], progress, -1).max()
        found = stuck if stuck.any() else still & ~self._is_meeting[phase] & (progress <= furthest)
        # A stage between two phases may wait for a receiver: it is named only if no other rank is.
        in_phase = found & (phase > 0)
        return in_phase if in_phase.any() else found

    def find_standstill(self) -> Stall | None:
        """Return a Stall if all ranks have waited too long in one exchange while no node's ports carried anything.

        Ports that never carried anything prove nothing: the system does not count the traffic of some networks. Ranks
        that wait for some others need not all be in the same exchange.
        """
        seen = self._positions
        waits = self._waits()
        is_one_step, is_one_meeting = (len(np.unique(seen[name])) == 1 for name in ("step", "meetings"))
        same = is_one_step and (is_one_meeting or self._is_wait[seen["phase"]].any())
        if not (waits.all() and same and self._has_moved.all() and (self._unmoved_s >= self._after_s).all()):
            return None
        return self._stall(np.zeros(len(seen), bool), 0, waits, 0)

    def _stall(self, held_by: np.ndarray, first: int, waiting: np.ndarray, furthest: int) -> Stall:
        """Make a Stall. first: index of the first rank that holds up others, or 0; furthest: of one that waits."""
        seen = self._positions
        is_silent = bool(self._silent()[first])
        since = self._silent_s if is_silent else self._still_s
        return Stall(
            seen["rank"][held_by].tolist(), int(seen["step"][first]), int(seen["phase"][first]),
            int(seen["pid"][first]), float(since[first]), is_silent, bool(seen["cut_off"][first]),
            int(waiting.sum()), int(seen["phase"][furthest]), float(self._still_s[furthest]),
        )  # fmt: skip

    def _waits(self) -> np.ndarray:
        """Return (ranks,) bool: which ranks have been in the same wait for too long."""
        seen = self._positions
        is_waiting = self._is_meeting | self._is_wait
        return is_waiting[seen["phase"]] & (self._still_s >= self._after_s) & (seen["step"] < LEFT)

    def _silent(self) -> np.ndarray:
        return (self._silent_s >= self._after_s) & (self._positions["step"] < LEFT)


class Lookout:
    """Decides when one rank looks at the positions of all, so that thousands of ranks do not read thousands of files.

    Ranks 0 and 1 look, and the leaders of the other nodes once these two are silent. `before`: this rank judges only if
    these ranks are silent; None for a rank that never judges. first_nodes: of ranks 0 and 1.
    """

    def __init__(self, world: World, live: LivePositions, new_observation: Callable[[], Observation]):
        watchers = [place["rank"] for place in world.places if place["rank"] < 2 or place["local_rank"] == 0]
        self.before = watchers[: watchers.index(world.rank)] if world.rank in watchers else None
        self.first_nodes = {place["node"] for place in world.places[:2]}
        self._world = world
        self._live = live
        self._first = new_observation()
        self._all = new_observation()

    def look(self) -> Observation | None:
        """Look at all ranks and return the observation; None if this is left to other ranks."""
        now = time.monotonic()
        if self.before is None:
            return None
        if self._world.rank > 1:
            self._first.look(self._live.read(self.first_nodes), now)
            if not self._first.are_silent((0, 1)):
                return None
        self._all.look(self._live.read(range(self._world.node_count)), now)
        return self._all

    def gone_ranks(self) -> list[int] | None:
        """Return the gone ranks; [] if another rank has named them and this one must end; None if none is gone.

        The watchdog's thread calls only this, and often, after this rank has received SIGTERM.
        """
        live = self._live
        live.pulse(is_asked=True)
        if live.unseen:  # a rank on an unseen host may live, and write the checkpoint
            return None
        if self._world.node_count > 1 and self._world.local_rank < 2:
            live.publish()
        if live.read(self.first_nodes)["ends"].any():
            return []
        seen = self.look()
        if seen is None:
            return None
        if seen.has_end():
            return []
        if not seen.are_silent(self.before):
            return None  # a rank in `before` lives, and judges
        return seen.find_gone() or None
