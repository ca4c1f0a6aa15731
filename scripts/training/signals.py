"""Requests to a training run, by signals and by the clock.

SIGUSR1 requests a checkpoint. SIGUSR2, SIGTERM and Ctrl-C (SIGINT) request a checkpoint and the end. A second Ctrl-C
ends the job at once. Handlers only record signals: ranks get them at different moments, or only some ranks get them, so
a rank reports them at the end of a step (meeting.py). SIGUSR2 is for launchers such as Open MPI's mpirun, which end the
ranks themselves on SIGTERM but pass SIGUSR2 on.

Before the end of the first step there is nothing to checkpoint, so a request for the end ends the job at once. While
Python imports modules, SIGUSR1 and SIGUSR2 are blocked, because they would end the process, and Ctrl-C ends it without
a traceback.
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

from dist.console import BY_CTRL_C

NOTHING, CHECKPOINT, TIME_IS_UP, END, QUIT = range(5)  # ordered: of several requests the largest counts
ASKS = {signal.SIGUSR1: CHECKPOINT, signal.SIGUSR2: END, signal.SIGTERM: END, signal.SIGINT: QUIT}
INTERRUPTED = os.EX_TEMPFAIL  # 75, the exit code of a run that --resume can continue
EXIT_CODES = {TIME_IS_UP: 0, END: INTERRUPTED, QUIT: BY_CTRL_C}
ENDED_BY = {TIME_IS_UP: "--minutes", END: "a signal", QUIT: "a signal"}
ONE_PRESS_S = 0.3  # a terminal and a launcher may both pass on the same Ctrl-C
WAITING = signal.SIGUSR1, signal.SIGUSR2


def let_wait() -> None:
    """Block the signals in WAITING until Signals is constructed. The kernel keeps them pending."""
    signal.pthread_sigmask(signal.SIG_BLOCK, WAITING)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Signals:
    """Catches the signals of ASKS and turns them into requests.

    end(text, exit code): ends the job and does not return; called for a request to end before the first step, and for a
    second Ctrl-C. clean_up: called before a run ends without a step.
    """

    def __init__(self, end: Callable[[str, int], None], clean_up: Callable[[], None] = lambda: None):
        self._end = end
        self._clean_up = clean_up
        self._has_met = False
        self._pressed = None
        self._arrived = dict.fromkeys(ASKS, 0)
        self._answered = dict(self._arrived)
        for number in ASKS:
            signal.signal(number, self._count)
        # While the main thread waits in MPI, Python runs no handler, but it writes the signal's number to this pipe.
        self._numbers, writing = os.pipe()
        for descriptor in (self._numbers, writing):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        self._has_sigterm = False
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WAITING)

    def close(self) -> None:
        """Ignore the signals from now on.

        The default handlers must not come back: when the first rank ends with a code other than 0, `srun
        --kill-on-bad-exit` sends SIGTERM to the others, and Python removes its handlers before MPI has ended.
        """
        signal.set_wakeup_fd(-1)
        for number in ASKS:
            signal.signal(number, signal.SIG_IGN)

    def _count(self, number, frame) -> None:
        self._arrived[number] += 1
        code = EXIT_CODES.get(ASKS[number])
        now = time.monotonic()
        if code and not self._has_met:
            name = signal.Signals(number).name
            self._clean_up()
            self._end(f"{name} ends the run before its first step: the same command with --resume begins\n", code)
        elif number == signal.SIGINT and self._pressed is not None and now - self._pressed > ONE_PRESS_S:
            self._end("second Ctrl-C: the run ends at once, --resume continues from its last checkpoint\n", code)
        elif number == signal.SIGINT:
            self._pressed = now

    def has_sigterm(self) -> bool:
        """Return whether SIGTERM has come, even while the main thread waits in MPI. Only one thread may call this."""
        with suppress(BlockingIOError):
            while numbers := os.read(self._numbers, 64):
                self._has_sigterm |= signal.SIGTERM in numbers
        return self._has_sigterm

    def requested(self) -> int:
        """Return the largest request since the last call, NOTHING to QUIT. The first call ends the first step."""
        self._has_met = True
        arrived = dict(self._arrived)
        new = [what for number, what in ASKS.items() if arrived[number] > self._answered[number]]
        self._answered = arrived
        return max(new, default=NOTHING)


class Clock:
    """Requests a checkpoint every `checkpoint_minutes`, and the end after `minutes`; 0: never.

    Only rank 0 has a clock, so all ranks act at the same step. Minutes count from the clock's construction, before a
    text is tokenized and a strategy chosen: both may take long, and a run must keep its time limit.
    """

    def __init__(self, checkpoint_minutes: float, minutes: float):
        self._every_s = 60 * checkpoint_minutes
        self._limit_s = 60 * minutes
        self._begun = self._checkpoint_at = time.monotonic()

    def requested(self) -> int:
        """Return NOTHING, CHECKPOINT or TIME_IS_UP. Minutes to the next checkpoint count from the last request."""
        now = time.monotonic()
        if self._limit_s and now - self._begun >= self._limit_s:
            return TIME_IS_UP
        if self._every_s and now - self._checkpoint_at >= self._every_s:
            self._checkpoint_at = now
            return CHECKPOINT
        return NOTHING

    def left_s(self) -> float | None:
        """Return the seconds until the clock requests the end; None if it never does."""
        return max(0.0, self._begun + self._limit_s - time.monotonic()) if self._limit_s else None
