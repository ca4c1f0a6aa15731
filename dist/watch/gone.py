"""After SIGTERM, end the ranks that wait for a rank that is gone: they cannot do what the signal asks for.

Where a rank has died, `srun --kill-on-bad-exit` sends SIGTERM to the remaining ranks, and SIGKILL only after SLURM's
KillWait, 30 s by default. A training answers SIGTERM with a checkpoint and its end, for which all ranks must meet.
Ranks that wait in MPI for the dead one never return, and Python's signal handler does not run there. But their
watchdog's threads run. Each shows that SIGTERM has come, and looks at the others' positions (live.py) four times a
second. A rank is gone if it shows no life and no SIGTERM, while all others have received SIGTERM and wait (stalls.py).

One rank concludes that, names the rank that is gone, marks its own record, and ends. The others see the mark, and end.
Ranks 0 and 1 look at all nodes, and the leaders of the other nodes once these two are silent. All others read only the
records of the first two ranks' nodes, so thousands of nodes do not all read thousands of files.
"""

import time
from collections.abc import Callable

from dist.watch.live import LivePositions
from dist.watch.stalls import Observation
from dist.world import World


class EndWithoutGone:
    """Finds ranks that are gone after SIGTERM, in the watchdog's thread of one rank.

    before: this rank looks at all ranks once these are silent; None if it never does. first_nodes: the nodes of ranks 0
    and 1. new_observation: makes an Observation of ranks that are silent or wait for too long. After SIGTERM ranks
    signal four times a second, before it at the watchdog's pace; the Observation's limit allows for both.
    """

    def __init__(
        self,
        world: World,
        live: LivePositions,
        before: list[int] | None,
        first_nodes: set[int],
        new_observation: Callable[[], Observation],
    ):
        self._world, self._live, self._before, self._first_nodes = world, live, before, first_nodes
        self._first, self._all = new_observation(), new_observation()

    def look(self) -> list[int] | None:
        """Return the gone ranks; [] if another rank has named them and this one must end; None if none is gone.

        Call it often from the moment when SIGTERM has come to this rank.
        """
        self._live.pulse(is_asked=True)
        if self._live.unseen:  # a rank there may live, and do what was asked for
            return None
        if self._world.node_count > 1 and self._world.local_rank < 2:
            self._live.publish()
        first = self._live.read(self._first_nodes)
        if first["ends"].any():
            return []
        self._first.look(first, time.monotonic())
        if self._before is None or (self._world.rank > 1 and not self._first_are_silent()):
            return None
        return self._look_at_all()

    def _first_are_silent(self) -> bool:
        return self._first.is_silent(0) and self._first.is_silent(1)

    def _look_at_all(self) -> list[int] | None:
        positions = self._live.read(range(self._world.node_count))
        if positions["ends"].any():
            return []
        self._all.look(positions, time.monotonic())
        if not all(self._all.is_silent(rank) for rank in self._before):
            return None  # a rank in `before` lives, and does it
        return self._all.find_gone() or None
