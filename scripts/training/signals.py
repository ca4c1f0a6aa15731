"""What a signal asks of a run: SIGUSR1 a checkpoint, SIGUSR2 or SIGTERM a checkpoint and the end.

A handler only counts. Ranks get a signal at different moments, or only some of them do: what one was asked for, all
hear where they meet at the end of the step. SIGUSR2 is for launchers that end the ranks themselves on SIGTERM, as Open
MPI's mpirun does, but pass this one on.
"""

import os
import signal

NOTHING, CHECKPOINT, END = 0, 1, 2
ASKS = {signal.SIGUSR1: CHECKPOINT, signal.SIGUSR2: END, signal.SIGTERM: END}
INTERRUPTED = os.EX_TEMPFAIL  # 75, the exit code of a run that can be taken up again with --resume


class Signals:
    """From here on the signals end nothing; `asked()` says what has been asked for since it was called last."""

    def __init__(self):
        self._arrived = dict.fromkeys(ASKS, 0)
        self._answered = dict(self._arrived)
        for number in ASKS:
            signal.signal(number, self._count)

    def close(self) -> None:
        """From here on they are ignored. When its first rank has ended with a code that is not 0, `srun
        --kill-on-bad-exit` sends SIGTERM to the others, and Python takes its own handlers back before MPI ends."""
        for number in ASKS:
            signal.signal(number, signal.SIG_IGN)

    def _count(self, number, frame) -> None:
        self._arrived[number] += 1

    def asked(self) -> int:
        """NOTHING, CHECKPOINT or END."""
        arrived = dict(self._arrived)
        new = [what for number, what in ASKS.items() if arrived[number] > self._answered[number]]
        self._answered = arrived
        return max(new, default=NOTHING)
