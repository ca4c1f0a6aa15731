"""One start of a training of random_kills.py: its launcher's process, its end, and what it says."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from dist.probe.programs import mpirun_command, mpirun_environment
from tests.suites.faults.processes import processes_of, rank_processes, send, wait_until

TRAIN = Path(__file__).parents[3] / "scripts" / "train.py"
ENDLESS = 100_000_000  # steps
END_LIMIT_S, CATCH_UP_S = 120, 3600


class Failed(Exception):
    """Something did not go as it should, in one line."""


def as_nice_as_this() -> list[str]:
    """What starts a command with this process's priority, also under a launcher that begins a session for each rank.

    Linux shares cores between sessions first (sched(7), "The autogroup feature"): the nice value counts inside one.
    """
    return ["sh", "-c", f'echo {os.nice(0)} 2>/dev/null >/proc/self/autogroup; exec "$@"', "sh"]


class Job:
    """One start of the training on so many ranks: its launcher's process and what it prints, in RUN.txt."""

    def __init__(self, run: Path, flags: tuple, ranks: int, steps: int):
        self.run, self._output = run, run.with_name(f"{run.name}.txt")
        command = self.command(ranks, [*flags, "--steps", steps, "--resume", "--out", run])
        with open(self._output, "w") as output:
            self._process = subprocess.Popen(
                [str(word) for word in command],
                env=mpirun_environment(ranks), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip

    def command(self, ranks: int, flags: list) -> list:
        return [*mpirun_command(ranks), *as_nice_as_this(), sys.executable, TRAIN, *flags]

    @property
    def launcher(self) -> int:
        return self._process.pid

    def code(self) -> int | None:
        return self._process.poll()

    def ended(self) -> bool:
        return self.code() is not None

    def expect(self, code: int, limit_s: float = END_LIMIT_S) -> None:
        """Wait for its end. Failed where it comes too late, or with another code."""
        try:
            found = self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise Failed(f"{self.run}: has not ended in {limit_s} s: {self.last_words()}") from None
        if found != code:
            raise Failed(f"{self.run}: ended with {found}, expected {code}: {self.last_words()}")

    def kill(self) -> None:
        """Kill all of it, again until it is gone: a launcher that has just begun has no ranks yet. Failed."""
        wait_until(self._is_gone_or_killed, END_LIMIT_S)
        self.wait_until_gone()

    def _is_gone_or_killed(self) -> bool:
        left = processes_of(self.run)
        send(signal.SIGKILL, *left)
        return not left and self._is_gone()  # a process that a killed one has just forked is found the next time

    def wait_until_gone(self) -> None:
        """Failed where the launcher or a rank is still there: it would write what the next start writes."""
        if not wait_until(self._is_gone, END_LIMIT_S):
            left = rank_processes(self.run) or "the launcher"
            self._process.kill()
            raise Failed(f"{self.run}: {END_LIMIT_S} s after a kill there still are {left}")

    def _is_gone(self) -> bool:
        return self.ended() and not rank_processes(self.run)

    def says(self) -> str:
        return self._output.read_text(errors="replace")

    def last_words(self) -> str:
        return " / ".join(self.says().strip().splitlines()[-3:])
