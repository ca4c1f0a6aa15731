"""The run of random_kills.py --restarts: one process starts its ranks again and again, and nobody helps it."""

import json
import shlex
import signal
import sys

from dist.probe.programs import mpirun_command
from tests.suites.faults.case import INTERRUPTED
from tests.suites.faults.disturbed import Disturbed
from tests.suites.faults.job import END_LIMIT_S, TRAIN, Failed, Job, as_nice_as_this
from tests.suites.faults.log import last_step
from tests.suites.faults.processes import is_zombie, rank_processes, send, wait_until

SUPERVISION = "--restarts", 10_000, "--stall-after", 20, "--restart-after", 300
STOPPED = 0.25  # of the faults: a rank is stopped, not killed


class SupervisedJob(Job):
    """A Job that train.py --restarts starts, and starts again; its `launcher` is that process."""

    def command(self, ranks: int, flags: list) -> list:
        launcher = shlex.join([*mpirun_command(ranks), *as_nice_as_this()])
        return [sys.executable, TRAIN, *flags, *SUPERVISION, "--launcher", launcher]


class Supervised(Disturbed):
    """Its faults are those of ranks: a dead supervisor starts nothing any more."""

    new_job = SupervisedJob

    def hit(self) -> str:
        """Kill or stop one rank, and wait until all ranks of this start are gone. Failed."""
        self.makes_a_step()  # two starts without one are what ends a supervised run
        ranks = [*rank_processes(self.run).values()]
        is_stopped = self._chance.random() < STOPPED
        send(signal.SIGSTOP if is_stopped else signal.SIGKILL, self._chance.choice(ranks))
        what = f"a rank {'stopped' if is_stopped else 'killed'}"
        if not wait_until(lambda: all(map(is_zombie, ranks)), END_LIMIT_S) or self.job.ended():
            raise Failed(f"{self.run}: after {what}: {self.job.last_words()}")
        self._started_at = last_step(self.run)
        return what

    def end(self) -> None:
        """Ask for the end once the last fault is overcome. Failed."""
        self.makes_a_step()
        send(signal.SIGTERM, self.job.launcher)
        self.job.expect(INTERRUPTED)
        self.job.wait_until_gone()

    def facts(self) -> dict:
        lines = map(json.loads, (self.run / "restarts.jsonl").read_text().splitlines())
        return super().facts() | {"restarts": sum(line["ends"] is None for line in lines)}
