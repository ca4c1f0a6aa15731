"""What asks something of a training while it runs: signals, and the clock.

SIGUSR1 asks for a checkpoint, SIGUSR2 and SIGTERM for a checkpoint and the end, and so does Ctrl-C, SIGINT; the second
Ctrl-C ends the job at once. A handler only counts: ranks get a signal at different moments, or only some of them get
it, so a rank tells the others where they meet (meeting.py). SIGUSR2 exists for launchers that end the ranks themselves
on SIGTERM but pass this one on, as Open MPI's mpirun does.

Before the first step has ended nothing is there that a checkpoint could keep, and much may take long: then a wish for
the end ends the job at once. While Python imports, SIGUSR1 and SIGUSR2, whose usual effect would end it, wait, and
Ctrl-C ends it without a traceback.
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

from dist.console import BY_CTRL_C

NOTHING, CHECKPOINT, TIME_IS_UP, END, QUIT = range(5)  # in this order: of several wishes the largest counts
ASKS = {signal.SIGUSR1: CHECKPOINT, signal.SIGUSR2: END, signal.SIGTERM: END, signal.SIGINT: QUIT}
INTERRUPTED = os.EX_TEMPFAIL  # 75, the exit code of a run that --resume can go on with
EXIT_CODES = {TIME_IS_UP: 0, END: INTERRUPTED, QUIT: BY_CTRL_C}
ENDED_BY = {TIME_IS_UP: "--minutes", END: "a signal", QUIT: "a signal"}
ONE_PRESS_S = 0.3  # a terminal and a launcher may both hand on the same Ctrl-C
WAITING = signal.SIGUSR1, signal.SIGUSR2


def let_wait() -> None:
    """From here on, the kernel keeps the signals in WAITING until there are Signals."""
    signal.pthread_sigmask(signal.SIG_BLOCK, WAITING)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Signals:
    """Catches the signals of ASKS from here on, so that they end nothing, but for those that want the end of a run
    without a step, and a second Ctrl-C: that is `end(text, exit code)`, which does not return. clean_up: called before
    the end of a run without a step."""

    def __init__(self, end: Callable[[str, int], None], clean_up: Callable[[], None] = lambda: None):
        self._end, self._clean_up, self._has_met, self._pressed = end, clean_up, False, None
        self._arrived = dict.fromkeys(ASKS, 0)
        self._answered = dict(self._arrived)
        for number in ASKS:
            signal.signal(number, self._count)
        # While the main thread waits in MPI, Python runs no handler. The number of a signal is written all the same.
        self._numbers, writing = os.pipe()
        for end in (self._numbers, writing):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        self._has_sigterm = False
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WAITING)

    def close(self) -> None:
        """From here on the signals are ignored.

        They must not get their usual effect back. When the first rank has ended with a code other than 0, `srun
        --kill-on-bad-exit` sends SIGTERM to the others, and Python drops its own handlers before MPI has ended.
        """
        signal.set_wakeup_fd(-1)
        for number in ASKS:
            signal.signal(number, signal.SIG_IGN)

    def _count(self, number, frame) -> None:
        self._arrived[number] += 1
        code, now = EXIT_CODES.get(ASKS[number]), time.monotonic()
        if code and not self._has_met:
            name = signal.Signals(number).name
            self._clean_up()
            self._end(f"{name} ends the run before its first step: the same command with --resume begins\n", code)
        elif number == signal.SIGINT and self._pressed is not None and now - self._pressed > ONE_PRESS_S:
            self._end(
                "Ctrl-C for the second time ends the run at once: --resume goes on from its last checkpoint\n", code
            )
        elif number == signal.SIGINT:
            self._pressed = now

    def has_sigterm(self) -> bool:
        """Whether SIGTERM has come. For one thread, which learns it while the main thread is held up in MPI, too."""
        with suppress(BlockingIOError):
            while numbers := os.read(self._numbers, 64):
                self._has_sigterm |= signal.SIGTERM in numbers
        return self._has_sigterm

    def requested(self) -> int:
        """The most that was asked for since the last call, NOTHING to QUIT. The first call ends the first step."""
        self._has_met = True
        arrived = dict(self._arrived)
        new = [what for number, what in ASKS.items() if arrived[number] > self._answered[number]]
        self._answered = arrived
        return max(new, default=NOTHING)


class Clock:
    """Asks for a checkpoint every so many minutes, and for the end after so many; 0: never.

    Rank 0's alone asks, so all ranks do the same at the same step. Minutes count from its making: before a text is
    tokenized and a strategy chosen, which may take long, so that a run with a time limit of its own keeps it.
    """

    def __init__(self, checkpoint_minutes: float, minutes: float):
        self._every_s, self._limit_s = 60 * checkpoint_minutes, 60 * minutes
        self._begun = self._checkpoint_at = time.monotonic()

    def requested(self) -> int:
        """NOTHING, CHECKPOINT or TIME_IS_UP. A checkpoint that is asked for is taken for granted."""
        now = time.monotonic()
        if self._limit_s and now - self._begun >= self._limit_s:
            return TIME_IS_UP
        if self._every_s and now - self._checkpoint_at >= self._every_s:
            self._checkpoint_at = now
            return CHECKPOINT
        return NOTHING

    def left_s(self) -> float | None:
        """Seconds until it asks for the end; None if it never does."""
        return max(0.0, self._begun + self._limit_s - time.monotonic()) if self._limit_s else None
