"""The ranks of --restarts under their launcher: start them, pass signals on, end a start that makes no progress.

Some starts never end by themselves. When a host's cable is cut, Open MPI's mpirun stays after all ranks have ended.
dist/watch does not cover single ranks, ranks before their first step, or ranks that write the last checkpoint. So this
process watches the files in the run folder:

- A run that makes progress writes config.json after its first step, a line of its log each step, and parts of
  checkpoints. A start that writes nothing for --restart-after seconds has failed. The limit must be longer than a step,
  a validation, compiling and tokenizing.
- Rank 0 touches the lock every two seconds while it lives, even if it hangs (lock_file.py). When these touches stop,
  the ranks are gone, and GONE_S later this process ends the launcher.

Only seconds in which this process runs and the file system answers count, so a suspended job is not ended.
"""

import os
import signal
import subprocess
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

from dist.console import say
from dist.probe.programs import is_open_mpi
from dist.repeating import Repeating
from dist.world import end_without_mpi
from gpt2.errors import UserError
from scripts.training.lock_file import LOCK, look
from scripts.training.signals import WAITING

LOG = "log.jsonl"
CONFIG = "config.json"
SUMMARY = "summary.json"
WRITTEN = LOG, CONFIG, SUMMARY
LOOK_S = 5.0
GONE_S = 120.0  # six times as long as another job waits before it takes over a lock without a heartbeat
TO_END_S = 60.0  # from SIGTERM to SIGKILL: srun gives its ranks SLURM's KillWait, 30 s by default
STOOD_STILL = 124  # exit code, like that of timeout(1)
# Signals that request the end. SIGHUP comes from a terminal that is closed; under nohup it is ignored.
ENDING = signal.SIGTERM, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP


class LaunchedRanks:
    """The ranks under their launcher, one start at a time. Passes the signals of this process on to them.

    folder: the run folder. limit_s: --restart-after, 0 for no limit.
    """

    def __init__(self, launcher: str, folder: Path, limit_s: float):
        # A queue: a second signal may interrupt the handler of the first, where an Event would deadlock.
        self._ended = SimpleQueue()
        self.has_ended = False
        self._process = None
        self._folder = folder
        self._limit_s = limit_s
        # On SIGTERM srun kills the ranks, and Open MPI's mpirun kills its daemons; neither passes Ctrl-C on. SIGUSR2
        # kills MPICH's mpirun.
        self._is_hydra = Path(launcher).name != "srun" and not is_open_mpi(launcher)
        for number in (*ENDING, signal.SIGUSR1):
            if signal.getsignal(number) != signal.SIG_IGN or number != signal.SIGHUP:
                signal.signal(number, self._pass_on)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WAITING)

    def run(self, command: list[str]) -> int:
        """Start the ranks and wait for their end. Return the launcher's exit code as a shell does, or STOOD_STILL."""
        signs = SignsOfLife(self._folder, self._limit_s)
        self._looked_at = time.monotonic()
        self._stands_still = False
        try:
            # In a new session the launcher gets Ctrl-C once, from this process and not also from the terminal.
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        except OSError as error:
            end_without_mpi(f"--launcher {command[0]}: {error.strerror}: name one that is there", True)
        if self.has_ended:  # a signal came while this start was prepared
            self._process.send_signal(self._end_signal())
        # A thread, because the file system may not answer. Meanwhile this process passes signals on and waits.
        guard = Repeating(partial(self._end_if_over, signs), LOOK_S, "restarts")
        code = self._process.wait()
        guard.stop(LOOK_S)
        self._process = None
        return STOOD_STILL if self._stands_still else code if code >= 0 else 128 - code

    def _end_if_over(self, signs: "SignsOfLife") -> None:
        """End the launcher's process group if the start shows no more signs of life."""
        process = self._process
        passed_s = min(time.monotonic() - self._looked_at, 2 * LOOK_S)
        self._looked_at = time.monotonic()
        why = signs.why_over(passed_s)
        if why and process and process.poll() is None:
            self._stands_still = True
            say(f"train.py: {why}: it is ended")
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(TO_END_S)
                os.killpg(process.pid, signal.SIGKILL)

    def ends_within(self, seconds: float) -> bool:
        """Wait for `seconds`, or until a signal requests the end. Return whether one did."""
        with suppress(Empty):
            self._ended.get(timeout=seconds)
        return self.has_ended

    def _pass_on(self, number, frame) -> None:
        is_second = number == signal.SIGINT and self.has_ended
        if number in ENDING:
            self.has_ended = True
            self._ended.put(number)
            number = number if self._is_hydra and number == signal.SIGINT else self._end_signal()
        with suppress(AttributeError, ProcessLookupError):  # between two starts there are no ranks
            self._process.send_signal(signal.SIGKILL if is_second else number)

    def _end_signal(self) -> int:
        return signal.SIGTERM if self._is_hydra else signal.SIGUSR2


class SignsOfLife:
    """A start's signs of life in its run folder, and how long they have been missing. limit_s: see LaunchedRanks."""

    def __init__(self, folder: Path, limit_s: float):
        self._folder = folder
        self._limit_s = limit_s
        self._has_lock = False
        self._still_s = 0.0
        self._gone_s = 0.0
        self._seen = self._look()

    def why_over(self, passed_s: float) -> str | None:
        """Look again, passed_s seconds after the last look. Return why this start has failed, None if it has not."""
        before = self._seen
        now = self._look()
        self._seen = now or before
        if before is None or now is None:
            return None
        has_touched, has_written = (one != other for one, other in zip(before, now, strict=True))
        self._has_lock |= has_touched  # a lock that never changes belongs to an earlier start
        self._still_s = 0.0 if has_written else self._still_s + passed_s
        self._gone_s = 0.0 if has_written or has_touched else self._gone_s + passed_s
        if 0 < self._limit_s <= self._still_s:
            return f"this start has written nothing to {self._folder} for {self._still_s:.0f} s (--restart-after)"
        if self._limit_s > 0 and self._has_lock and self._gone_s >= GONE_S:
            return f"the launcher is still there {self._gone_s:.0f} s after rank 0's last sign of life"
        return None

    def _look(self) -> tuple | None:
        """Return (lock, written files); None if the file system fails, which says nothing about the ranks."""
        try:
            return look(self._folder / LOCK), _written_in(self._folder)
        except (UserError, OSError):
            return None


def _written_in(folder: Path) -> list[tuple]:
    """Return (path, size, time of change) of the files that a run writes as it makes progress. Raise OSError."""
    parts = folder / "checkpoints"
    paths = [*(folder / name for name in WRITTEN), *sorted(parts.glob("*")), *sorted(parts.glob("*.part/*"))]
    found = []
    for path in paths:
        with suppress(FileNotFoundError):
            status = path.stat()
            found.append((path, status.st_size, status.st_mtime_ns))
    return found
