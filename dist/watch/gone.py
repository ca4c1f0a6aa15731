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


def gone_ranks(world: World, live: LivePositions, lookout: Lookout) -> list[int] | None:
    """Return the gone ranks; [] if another rank has named them and this one must end; None if none is gone.

    The watchdog's thread calls this often after this rank has received SIGTERM. lookout: for these calls alone.
    """
    live.pulse(is_asked=True)
    if live.unseen:  # a rank on an unseen host may live, and write the checkpoint
        return None
    if world.node_count > 1 and world.local_rank < 2:
        live.publish()
    if live.read(lookout.first_nodes)["ends"].any():
        return []
    seen = lookout.look()
    if seen is None:
        return None
    if seen.has_end():
        return []
    if not seen.are_silent(lookout.before):
        return None  # a rank in `before` lives, and judges
    return seen.find_gone() or None
