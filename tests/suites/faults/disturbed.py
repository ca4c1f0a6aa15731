"""The run of random_kills.py that is killed at random moments and taken up again, and the account of it."""

import random
import signal
import time
from pathlib import Path

from tests.suites.faults.job import CATCH_UP_S, ENDLESS, Failed, Job
from tests.suites.faults.log import last_step, newest_step
from tests.suites.faults.processes import rank_processes, send, wait_until

BEGIN_LIMIT_S = 300  # to a start's first step, on a machine that has other work
LEAD = 100  # steps: an undisturbed run that is farther ahead waits


class Disturbed:
    """run: its folder. flags: train.py's. every_s: between two faults, on average."""

    new_job = Job

    def __init__(self, run: Path, flags: tuple, chance: random.Random, ranks: int, every_s: float):
        self.run, self._flags, self._chance, self._ranks, self._every_s = run, flags, chance, ranks, every_s
        self.happened, self.lost_steps, self.most_lost, self._step_before = [], 0, 0, 0
        self.start(ENDLESS)

    def start(self, steps: int) -> None:
        self._started_at = last_step(self.run)
        self.job = self.new_job(self.run, self._flags, self._ranks, steps)

    def until(self, deadline: float, quiet: Job) -> None:
        """Disturb the job, and start it again where it has ended, until the deadline; the last fault is then."""
        while (now := time.monotonic()) < deadline:
            pause_s = self._every_s * self._chance.uniform(0.5, 1.5)
            self._wait(min(pause_s, deadline - now), quiet)
            said = self.hit()
            self.happened.append(said)
            self._account(said)
            if self.job.ended() and time.monotonic() < deadline:
                self.start(ENDLESS)

    def _wait(self, pause_s: float, quiet: Job) -> None:
        """Meanwhile neither may end. The undisturbed run stands still while it is far ahead. Failed."""
        until, stopped = time.monotonic() + pause_s, False
        while time.monotonic() < until:
            wait_until(lambda: self.job.ended() or quiet.ended(), min(1.0, max(0.0, until - time.monotonic())))
            if self.job.ended() or quiet.ended():
                job = self.job if self.job.ended() else quiet
                raise Failed(f"{job.run}: ended by itself: {job.last_words()}")
            if stopped != (last_step(quiet.run) > last_step(self.run) + LEAD):
                stopped = not stopped
                send(signal.SIGSTOP if stopped else signal.SIGCONT, *rank_processes(quiet.run).values())
        send(signal.SIGCONT, *rank_processes(quiet.run).values())

    def end(self) -> None:
        """When the time is over, nothing is left of a job that the last fault has killed."""

    def end_at(self, steps: int) -> None:
        """Bring the run to its end after that step. Failed."""
        self.start(steps)
        self.job.expect(0, CATCH_UP_S)

    def makes_a_step(self) -> None:
        """Wait until this start has made a step that none before it had made. Failed."""
        wait_until(lambda: self.job.ended() or last_step(self.run) > self._started_at, BEGIN_LIMIT_S)
        if self.job.ended() or last_step(self.run) <= self._started_at:
            raise Failed(f"{self.run}: makes no step after {self._started_at}: {self.job.last_words()}")

    def hit(self) -> str:
        """Send SIGKILL to one of the victims, and wait until nothing of the job is left."""
        victims = {"the launcher": [self.job.launcher]}
        if ranks := [*rank_processes(self.run).values()]:
            victims |= {"a rank": [self._chance.choice(ranks)], "all ranks": ranks}
        name = self._chance.choice(sorted(victims))
        send(signal.SIGKILL, *victims[name])
        self.job.wait_until_gone()
        return f"{name} killed"

    def _account(self, what: str) -> None:
        step = last_step(self.run)
        lost = 0 if step == self._step_before else step - newest_step(self.run)  # 0: counted before
        self.lost_steps, self.most_lost = self.lost_steps + lost, max(self.most_lost, lost)
        self._step_before = step
        print(f"{time.strftime('%H:%M:%S')} {what} after step {step}: {lost} steps lost", flush=True)

    def facts(self) -> dict:
        return {
            "faults": {name: self.happened.count(name) for name in sorted(set(self.happened))},
            "lost_steps": self.lost_steps, "most_lost": self.most_lost,
        }  # fmt: skip
