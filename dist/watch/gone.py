"""After SIGTERM, end the ranks that wait for a rank that is gone: they cannot do what the signal asks for.

If a rank has died, `srun --kill-on-bad-exit` sends SIGTERM to the remaining ranks, and SIGKILL only after SLURM's
KillWait, 30 s by default. Training answers SIGTERM with a checkpoint, for which all ranks must meet. Ranks that wait in
MPI for the dead rank never return, and Python's signal handler does not run there. But their watchdog threads run. A
rank is gone if it shows no sign of life and no SIGTERM, while all others have received SIGTERM and wait (stalls.py).
One rank concludes that, names the gone rank, marks its own record, and ends. The others see the mark, and end.
"""

from dist.watch.live import LivePositions
from dist.watch.stalls import Lookout
from dist.world import World


class EndWithoutGone:
    """Finds ranks that are gone after SIGTERM, in the watchdog's thread of one rank."""

    def __init__(self, world: World, live: LivePositions, lookout: Lookout):
        self._is_published = world.node_count > 1 and world.local_rank < 2
        self._live = live
        self._lookout = lookout

    def look(self) -> list[int] | None:
        """Return the gone ranks; [] if another rank has named them and this one must end; None if none is gone.

        Call it often after this rank has received SIGTERM.
        """
        self._live.pulse(is_asked=True)
        if self._live.unseen:  # a rank on an unseen host may live, and write the checkpoint
            return None
        if self._is_published:
            self._live.publish()
        if self._live.read(self._lookout.first_nodes)["ends"].any():
            return []
        seen = self._lookout.look()
        if seen is None:
            return None
        if seen.has_end():
            return []
        if not seen.are_silent(self._lookout.before):
            return None  # a rank in `before` lives, and judges
        return seen.find_gone() or None
