"""What is concluded from what is seen of the ranks: who holds the others up, or that nobody does.

The watchdog (watchdog.py) shows what it sees; all times are its own clock's.
"""

from dataclasses import dataclass

import numpy as np

from dist.watch.live import LEFT

STANDING_BYTES_S = 1e5  # through a node's ports: less is what the system and we ourselves send, and no exchange


@dataclass(frozen=True)
class Stall:
    """`ranks` hold the others up; none does where all of them wait and the network stands still. is_cut_off: their
    node's port has lost its link. step, phase, pid, since_s, is_silent: of the first of them; waiting: ranks, in
    waiting_phase, since waiting_s."""

    ranks: list[int]
    step: int
    phase: int
    pid: int
    since_s: float
    is_silent: bool
    is_cut_off: bool
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
        self._unmoved_s[moving], self._has_moved[moving] = 0, True
        self._positions[at], self._looked_at = positions, now

    def is_silent(self, rank: int) -> bool:
        return bool(self._silent()[self._positions["rank"] == rank].any())

    def find_stall(self) -> Stall | None:
        """Which ranks hold up others that have waited too long, if any do."""
        seen, silent = self._positions, self._silent()
        waits = self._waits() & ~silent
        if not waits.any():
            return None
        # A step has fewer meetings than that; ranks in the same collective have the same number.
        progress = seen["step"] * (1 << 20) + seen["meetings"]
        behind = progress < progress[waits].max()
        cut_off = (seen["cut_off"] != 0) & (seen["step"] < LEFT)
        # One that shows no life, or cannot be reached, may have gone further than those that need its help.
        held_by = next((mask for mask in (silent, cut_off) if mask.any()), behind & (progress == progress.min()))
        if not held_by.any():
            return None
        furthest = int(np.argmax(np.where(waits, progress, -1)))
        return self._stall(held_by, int(np.argmax(held_by)), waits & ~held_by, furthest)

    def find_standstill(self) -> Stall | None:
        """All ranks wait in the same exchange for too long, and no node's ports have carried anything all that time.

        Of ports that never did nothing is concluded: there are networks whose traffic the system does not count.
        """
        seen, waits = self._positions, self._waits()
        same = all(len(np.unique(seen[name])) == 1 for name in ("step", "meetings"))
        if not (waits.all() and same and self._has_moved.all() and (self._unmoved_s >= self._after_s).all()):
            return None
        return self._stall(np.zeros(len(seen), bool), 0, waits, 0)

    def _stall(self, held_by: np.ndarray, first: int, waiting: np.ndarray, furthest: int) -> Stall:
        """first: of those that hold up, or of all. furthest: of those that wait."""
        seen, is_silent = self._positions, bool(self._silent()[first])
        since = self._silent_s if is_silent else self._still_s
        return Stall(
            seen["rank"][held_by].tolist(), int(seen["step"][first]), int(seen["phase"][first]),
            int(seen["pid"][first]), float(since[first]), is_silent, bool(seen["cut_off"][first]),
            int(waiting.sum()), int(seen["phase"][furthest]), float(self._still_s[furthest]),
        )  # fmt: skip

    def _waits(self) -> np.ndarray:
        """Who has been in the same meeting for too long."""
        seen = self._positions
        return self._is_meeting[seen["phase"]] & (self._still_s >= self._after_s) & (seen["step"] < LEFT)

    def _silent(self) -> np.ndarray:
        return (self._silent_s >= self._after_s) & (self._positions["step"] < LEFT)
