"""The run of random_kills.py that meets faults at random moments and is taken up again, and the account of it."""

import random
import signal
import time
from pathlib import Path

from tests.suites.faults.case import INTERRUPTED, MISTAKE
from tests.suites.faults.disk import empty, fill
from tests.suites.faults.job import CATCH_UP_S, END_LIMIT_S, ENDLESS, Failed, Job, Settings
from tests.suites.faults.log import last_step, newest_step
from tests.suites.faults.processes import rank_processes, send, wait_until

BEGIN_LIMIT_S = 300  # to a start's first step, on a machine that has other work
FULL_LIMIT_S, FULL_S = 120, 1  # to a checkpoint that finds no room; and so much longer
LEAD = 100  # steps: an undisturbed run that is farther ahead waits


class Disturbed:
    """run: its folder. ranks: each start draws one of these numbers. faults: of FAULTS. every_s: on average."""

    new_job = Job

    def __init__(
        self, run: Path, settings: Settings, chance: random.Random, ranks: list[int], faults: dict, every_s: float
    ):
        self.run, self._settings, self._chance, self._ranks = run, settings, chance, ranks
        self._faults, self._every_s = faults, every_s
        self.happened, self.second_s, self.lost_steps, self.most_lost, self._step_before = [], [], 0, 0, 0
        self.start(ENDLESS)

    def start(self, steps: int) -> None:
        self._started_at = last_step(self.run)
        self.job = self.new_job(self.run, self._settings, self._chance.choice(self._ranks), steps)

    def until(self, deadline: float, quiet: Job) -> None:
        """Disturb the job, and start it again where it has ended, until the deadline; the last fault is then."""
        while (now := time.monotonic()) < deadline:
            pause_s = self._every_s * self._chance.uniform(0.5, 1.5)
            self._wait(min(pause_s, deadline - now), quiet)
            happens = self._chance.choice([*self._faults.values()])
            said, ranks = happens(self), self.job.ranks
            self.happened.append(said)
            self._account(f"{said} ({ranks} ranks)")
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

    def has_failed(self) -> bool:
        """Whether the last fault has ended the ranks."""
        return self.job.ended()

    def end(self) -> None:
        """End the job that is left when the time is over."""
        if not self.job.ended():  # of a fault that it survives
            self.job.kill()

    def end_at(self, steps: int) -> None:
        """Bring the run to its end after that step. Failed."""
        self.start(steps)
        self.job.expect(0, CATCH_UP_S)

    def makes_a_step(self) -> None:
        """Wait until this start has made a step that none before it had made. Failed."""
        wait_until(lambda: self.job.ended() or last_step(self.run) > self._started_at, BEGIN_LIMIT_S)
        if self.job.ended() or last_step(self.run) <= self._started_at:
            raise Failed(f"{self.run}: makes no step after {self._started_at}: {self.job.last_words()}")

    def goes_on(self, what: str) -> None:
        """Failed unless the job makes another step."""
        step = last_step(self.run)
        wait_until(lambda: self.job.ended() or last_step(self.run) > step, BEGIN_LIMIT_S)
        if self.job.ended() or last_step(self.run) <= step:
            raise Failed(f"{self.run}: does not go on after {what}: {self.job.last_words()}")

    def kill(self) -> str:
        """Send SIGKILL to one of the victims, and wait until nothing of the job is left."""
        victims = {"the launcher": [self.job.launcher]}
        if ranks := [*rank_processes(self.run).values()]:
            victims |= {"a rank": [self._chance.choice(ranks)], "all ranks": ranks}
        name = self._chance.choice(sorted(victims))
        send(signal.SIGKILL, *victims[name])
        self.job.wait_until_gone()
        return f"{name} killed"

    def terminate(self) -> str:
        """SIGTERM to all ranks, which leave a checkpoint."""
        self.makes_a_step()
        send(signal.SIGTERM, *rank_processes(self.run).values())
        self.job.expect(INTERRUPTED)
        self.job.wait_until_gone()
        if newest_step(self.run) != last_step(self.run):
            raise Failed(f"{self.run}: SIGTERM left no checkpoint of step {last_step(self.run)}")
        return "SIGTERM"

    def ask(self) -> str:
        """SIGUSR1 to one rank, which asks for a checkpoint."""
        self.makes_a_step()
        newest = newest_step(self.run)
        send(signal.SIGUSR1, self._chance.choice([*rank_processes(self.run).values()]))
        wait_until(lambda: self.job.ended() or newest_step(self.run) > newest, BEGIN_LIMIT_S)
        if newest_step(self.run) <= newest:
            raise Failed(f"{self.run}: SIGUSR1 left no checkpoint")
        self.goes_on("SIGUSR1")
        return "SIGUSR1"

    def fill_disk(self) -> str:
        """Until a checkpoint has found no room, and has said so, or the job has ended for that, with one line."""
        self.makes_a_step()
        fill(self.run)
        wait_until(lambda: self.job.ended() or "was not written" in self.job.says(), FULL_LIMIT_S)
        wait_until(self.job.ended, FULL_S)  # the log may be what finds no room a moment later
        empty(self.run)
        step = last_step(self.run)
        wait_until(lambda: self.job.ended() or last_step(self.run) > step, BEGIN_LIMIT_S)
        if not self.job.ended():
            self.goes_on("a full disk")
            return "full disk"
        if self.job.code() == 0 or "error: " not in self.job.says():
            raise Failed(f"{self.run}: code {self.job.code()} on a full disk: {self.job.last_words()}")
        self.job.wait_until_gone()
        return "full disk, ended"

    def start_second(self) -> str:
        """Another job in the same folder, which is refused."""
        self.makes_a_step()
        begun = time.monotonic()
        second = Job(self.run, self._settings, self._chance.choice(self._ranks), ENDLESS, "second")
        try:
            second.expect(MISTAKE, END_LIMIT_S)
        except Failed:
            send(signal.SIGKILL, second.launcher)
            raise Failed(f"{self.run}: a second job was not refused: {second.last_words()}") from None
        self.second_s.append(round(time.monotonic() - begun, 2))
        self.goes_on("a second job")
        return "second job"

    def _account(self, what: str) -> None:
        step = last_step(self.run)
        ended = self.has_failed() and step != self._step_before  # else it was not so far yet: counted before
        lost = step - newest_step(self.run) if ended else 0
        self.lost_steps, self.most_lost = self.lost_steps + lost, max(self.most_lost, lost)
        self._step_before = step
        print(f"{time.strftime('%H:%M:%S')} {what} after step {step}: {lost} steps lost", flush=True)

    def facts(self) -> dict:
        return {
            "faults": {name: self.happened.count(name) for name in sorted(set(self.happened))},
            "lost_steps": self.lost_steps, "most_lost": self.most_lost, "second_s": self.second_s,
        }  # fmt: skip


FAULTS = {
    "kill": Disturbed.kill, "term": Disturbed.terminate, "usr1": Disturbed.ask, "disk": Disturbed.fill_disk,
    "second": Disturbed.start_second,
}  # fmt: skip
