"""The ranks of --restarts under their launcher: a start at a time, the signals for it, its end where it stands still.

Some starts never end by themselves. Open MPI's mpirun stays where a host's cable was cut, though all ranks have ended.
Ranks that hang before their first step do not watch each other yet (dist/watch), one rank alone is watched by nobody,
and neither are ranks that write the run's last checkpoint. So this process looks at what grows in the run folder:

- A run that moves on writes config.json after its first step, a line of its log each step, and parts of a checkpoint
  meanwhile. A start that writes none of it for --restart-after seconds has failed. Nothing shows within a step, nor
  while the run compiles, tokenizes a text or validates: the limit has to be longer than each of these. The default, an
  hour, is many times as long, so a run that moves on is not ended.
- Rank 0 touches the lock every two seconds while it lives, hanging or not (lock_file.py). If that ends, too, the ranks
  are gone: after GONE_S the launcher is. GONE_S is six times as long as what lets another job take over such a lock.

Seconds count only while this process looks, so nothing is over for a job that was suspended as a whole. A file system
that does not answer holds the look up, and no second counts.
"""

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue

from dist.console import say
from dist.probe.programs import is_open_mpi
from dist.repeating import Repeating
from dist.world import end_without_mpi
from gpt2.errors import UserError
from scripts.training.lock_file import LOCK, look
from scripts.training.signals import WAITING

LOG, CONFIG, SUMMARY = "log.jsonl", "config.json", "summary.json"
WRITTEN = LOG, CONFIG, SUMMARY
LOOK_S = 5.0
GONE_S = 120.0
TO_END_S = 60.0  # from SIGTERM to SIGKILL: srun gives its ranks SLURM's KillWait, 30 s by default
STOOD_STILL = 124  # exit code, as timeout's
# What asks for the end: SIGHUP, too, of a terminal that is closed, but under nohup. SIGUSR1 asks for a checkpoint.
ENDING = signal.SIGTERM, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP


class Ranks:
    """The ranks under their launcher, one start at a time, and the signals that this process gets for them.

    folder: of the run. limit_s: --restart-after, 0 for no limit.
    """

    def __init__(self, launcher: str, folder: Path, limit_s: float):
        # A queue, as a second signal may interrupt the handler of the first: an Event would wait for itself there.
        self._process, self._ended, self.has_ended = None, SimpleQueue(), False
        self._folder, self._limit_s = folder, limit_s
        # srun answers SIGTERM by killing the ranks, Open MPI's mpirun by killing its daemons, and both keep Ctrl-C for
        # themselves; MPICH's mpirun dies of SIGUSR2.
        self._is_hydra = Path(launcher).name != "srun" and not is_open_mpi(launcher)
        for number in (*ENDING, signal.SIGUSR1):
            if signal.getsignal(number) != signal.SIG_IGN or number != signal.SIGHUP:
                signal.signal(number, self._pass_on)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WAITING)

    def run(self, command: list[str]) -> int:
        """Start them, and wait for their end: the launcher's exit code, as a shell gives it, or STOOD_STILL."""
        signs = Signs(self._folder, self._limit_s)
        try:
            # A session of its own: the terminal's Ctrl-C comes from here alone, and once.
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        except OSError as error:
            end_without_mpi(f"--launcher {command[0]}: {error.strerror}: name one that is there", True)
        if self.has_ended:  # a signal came while this start was prepared, and had nobody to be handed to
            self._process.send_signal(self._end_signal())
        guard = Guard(self._process, signs)
        code = self._process.wait()
        guard.stop()
        self._process = None
        return STOOD_STILL if guard.has_ended_it else code if code >= 0 else 128 - code

    def ends_within(self, seconds: float) -> bool:
        """Wait so long, or until a signal asks for the end: whether one did."""
        with suppress(Empty):
            self._ended.get(timeout=seconds)
        return self.has_ended

    def _pass_on(self, number, frame) -> None:
        is_second = number == signal.SIGINT and self.has_ended
        if number in ENDING:
            self.has_ended = True
            self._ended.put(number)
            number = number if self._is_hydra and number == signal.SIGINT else self._end_signal()
        with suppress(AttributeError, ProcessLookupError):  # between two starts there are none
            self._process.send_signal(signal.SIGKILL if is_second else number)

    def _end_signal(self) -> int:
        return signal.SIGTERM if self._is_hydra else signal.SIGUSR2


class Guard:
    """A thread that looks at a start's signs, and where it is time ends the launcher with all of its process group.

    A thread, as a look may wait for the file system: signals are handed on meanwhile, and the launcher may end.
    """

    def __init__(self, process: subprocess.Popen, signs: "Signs"):
        self._process, self._signs, self._looked_at = process, signs, time.monotonic()
        self.has_ended_it = False
        self._thread = Repeating(self._look, LOOK_S, "restarts")

    def stop(self) -> None:
        self._thread.stop(LOOK_S)

    def _look(self) -> None:
        now = time.monotonic()
        passed_s, self._looked_at = min(now - self._looked_at, 2 * LOOK_S), now
        why = self._signs.why_over(passed_s)
        if why and self._process.poll() is None:
            self.has_ended_it = True
            say(f"train.py: {why}: it is ended")
            self._signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(TO_END_S)
            self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


class Signs:
    """What a start shows in its run folder, and for how long it has shown nothing new. limit_s: as Ranks'."""

    def __init__(self, folder: Path, limit_s: float):
        self._folder, self._limit_s = folder, limit_s
        self._has_lock, self._still_s, self._gone_s = False, 0.0, 0.0
        self._seen = self._look()

    def why_over(self, passed_s: float) -> str | None:
        """A look, so many seconds after the last one: why this start has failed, in words; None if it goes on."""
        before, now = self._seen, self._look()
        self._seen = now or before
        if before is None or now is None:
            return None
        has_touched, has_written = (one != other for one, other in zip(before, now, strict=True))
        self._has_lock |= has_touched  # one that never changes is an earlier start's
        self._still_s = 0.0 if has_written else self._still_s + passed_s
        self._gone_s = 0.0 if has_written or has_touched else self._gone_s + passed_s
        if 0 < self._limit_s <= self._still_s:
            return f"this start has written nothing to {self._folder} for {self._still_s:.0f} s (--restart-after)"
        if self._limit_s > 0 and self._has_lock and self._gone_s >= GONE_S:
            return f"the launcher is still there {self._gone_s:.0f} s after rank 0's last sign of life"
        return None

    def _look(self) -> tuple | None:
        """(the lock, what is written); None where the file system has a fault, which says nothing of the ranks."""
        try:
            return look(self._folder / LOCK), _written_in(self._folder)
        except (UserError, OSError):
            return None


def _written_in(folder: Path) -> list[tuple]:
    """(path, size, time of its last change) of what a run writes as it moves on. OSError."""
    parts = folder / "checkpoints"
    paths = [*(folder / name for name in WRITTEN), *sorted(parts.glob("*")), *sorted(parts.glob("*.part/*"))]
    found = []
    for path in paths:
        with suppress(FileNotFoundError):
            status = path.stat()
            found.append((path, status.st_size, status.st_mtime_ns))
    return found
