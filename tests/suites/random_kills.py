"""Training under random kills, taken up again each time, ends with the same bits as training that nobody disturbed.

    python tests/suites/random_kills.py --minutes 30 --every 60 --out runs/kills
    nice -n 19 python tests/suites/random_kills.py --minutes 5 --every 30

Two runs of the same settings train side by side on two ranks each. Of one, at random moments, a rank, the launcher, or
all ranks at once (a host that dies) are ended by SIGKILL; it is started again with --resume at once. When the minutes
are over, SIGTERM ends the other one after some step R, from a single start; the disturbed run is taken up for the last
time and told to end with step R, too. Then all losses, norms and the last state must be equal, bit for bit. How fast
the machine is decides only how many steps that are. Exit code 1: they are not, or a run ended as it should not have.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from dist.probe.programs import mpirun_command, mpirun_environment
from gpt2.formats.checkpoints import STATE, Checkpoint, newest_first
from scripts.machine.host import machine, versions
from scripts.training.signals import INTERRUPTED
from tests.suites.faults.log import curve, last_step, newest_step
from tests.suites.faults.processes import rank_processes, send, wait_until

RANKS = 2
TRAIN = Path(__file__).parents[2] / "scripts" / "train.py"
# A learning rate that does not depend on --steps, which nobody knows yet; waiting ranks of zero-2 leave their core.
TRAINING = (
    "--strategy", "zero-2", "--n-layer", 2, "--n-head", 2, "--n-embd", 64, "--context", 32, "--batch-size", 4,
    "--schedule", "constant", "--eval-every", 0, "--checkpoint-every", 100, "--trace", "off", "--threads", 1,
)  # fmt: skip
ENDLESS = 100_000_000  # steps
END_LIMIT_S, CATCH_UP_S = 120, 3600
AHEAD = 5  # steps that the undisturbed run is to be ahead of the other, for that to be able to reach its end


def as_nice_as_this() -> list[str]:
    """What starts a command with this process's priority, also under a launcher that begins a session for each rank.

    Linux shares cores between sessions first (sched(7), "The autogroup feature"): the nice value counts inside one.
    """
    return ["sh", "-c", f'echo {os.nice(0)} 2>/dev/null >/proc/self/autogroup; exec "$@"', "sh"]


class Failed(Exception):
    """Something did not go as it should, in one line."""


def main():
    arguments = parse()
    with tempfile.TemporaryDirectory() as folder:
        try:
            facts = compare_runs(arguments, Path(arguments.out or folder).absolute())
        except Failed as failure:
            raise SystemExit(f"random_kills.py: error: {failure}") from None
    print(summary(facts), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(facts | {"summary": summary(facts)}, indent=1) + "\n")


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30, help="how long to kill (30)")
    parser.add_argument("--every", type=float, default=60, metavar="S", help="seconds between kills, on average (60)")
    parser.add_argument("--seed", type=int, help="of the moments and the victims (other ones each time)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep both runs in this new folder")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the summary's numbers to this file")
    return parser.parse_args()


def compare_runs(arguments, folder: Path) -> dict:
    """Bring both runs to their end, and return the facts for summary(). Failed."""
    (folder / "disturbed").mkdir(parents=True)
    quiet = Job(folder / "undisturbed", ENDLESS)
    disturbed = Disturbed(folder / "disturbed", random.Random(arguments.seed), arguments.every)
    try:
        disturbed.until(time.monotonic() + 60 * arguments.minutes, quiet)
        wait_until(lambda: quiet.ended() or last_step(quiet.run) > last_step(disturbed.run) + AHEAD, CATCH_UP_S)
        send(signal.SIGTERM, *rank_processes(quiet.run).values())
        quiet.expect(INTERRUPTED)
        steps = newest_step(quiet.run)
        disturbed.start(steps)
        disturbed.job.expect(0, CATCH_UP_S)
    finally:
        quiet.kill()
        disturbed.job.kill()
    check_equal(quiet.run, disturbed.run, steps)
    return disturbed.facts() | {
        "minutes": arguments.minutes, "steps": steps, "last_loss": curve(quiet.run)[-1][1], "ranks": RANKS,
        "machine": machine() | versions("numpy", "mpi4py"),
    }  # fmt: skip


class Job:
    """One start of the training: its launcher's process and what it prints, in RUN.txt."""

    def __init__(self, run: Path, steps: int):
        self.run, self._output = run, run.with_suffix(".txt")
        train = [*as_nice_as_this(), sys.executable, TRAIN, *TRAINING, "--steps", steps, "--resume", "--out", run]
        with open(self._output, "w") as output:
            self._process = subprocess.Popen(
                [str(word) for word in [*mpirun_command(RANKS), *train]],
                env=mpirun_environment(RANKS), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip

    @property
    def launcher(self) -> int:
        return self._process.pid

    def ended(self) -> bool:
        return self._process.poll() is not None

    def expect(self, code: int, limit_s: float = END_LIMIT_S) -> None:
        """Wait for its end. Failed where it comes too late, or with another code."""
        try:
            found = self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise Failed(f"{self.run}: has not ended in {limit_s} s: {self.last_words()}") from None
        if found != code:
            raise Failed(f"{self.run}: ended with {found}, expected {code}: {self.last_words()}")

    def kill(self) -> None:
        """Kill all of it and wait until it is gone: ranks without their launcher would still write. Failed."""
        send(signal.SIGKILL, *rank_processes(self.run).values())
        self.wait_until_gone()

    def wait_until_gone(self) -> None:
        wait_until(lambda: self.ended() and not rank_processes(self.run), END_LIMIT_S)
        if not self.ended() or (left := rank_processes(self.run)):
            self._process.kill()
            raise Failed(f"{self.run}: {END_LIMIT_S} s after a kill there still are {left or 'the launcher'}")

    def last_words(self) -> str:
        return " / ".join(self._output.read_text().strip().splitlines()[-3:])


class Disturbed:
    """The run that is killed and taken up again, and the account of it."""

    def __init__(self, run: Path, chance: random.Random, every_s: float):
        self.run, self._chance, self._every_s = run, chance, every_s
        self.kills, self.lost_steps, self.most_lost, self._step_before = [], 0, 0, 0
        self.start(ENDLESS)

    def start(self, steps: int) -> None:
        self.job = Job(self.run, steps)

    def until(self, deadline: float, quiet: Job) -> None:
        """Kill the job and start it again until the deadline; the last kill is then."""
        while (now := time.monotonic()) < deadline:
            pause_s = self._every_s * self._chance.uniform(0.5, 1.5)
            wait_until(lambda: self.job.ended() or quiet.ended(), min(pause_s, deadline - now))
            if self.job.ended() or quiet.ended():
                job = self.job if self.job.ended() else quiet
                raise Failed(f"{job.run}: ended by itself: {job.last_words()}")
            self.kill()
            if time.monotonic() < deadline:
                self.start(ENDLESS)

    def kill(self) -> None:
        """Send SIGKILL to one of the victims, and wait until nothing of the job is left."""
        victims = {"the launcher": [self.job.launcher]}
        if ranks := [*rank_processes(self.run).values()]:
            victims |= {"a rank": [self._chance.choice(ranks)], "all ranks": ranks}
        name = self._chance.choice(sorted(victims))
        send(signal.SIGKILL, *victims[name])
        self.job.wait_until_gone()
        self.kills.append(name)
        self._account(name)

    def _account(self, victim: str) -> None:
        step = last_step(self.run)
        lost = step - newest_step(self.run) if step != self._step_before else 0  # not so far yet: counted before
        self.lost_steps, self.most_lost = self.lost_steps + lost, max(self.most_lost, lost)
        self._step_before = step
        print(f"{time.strftime('%H:%M:%S')} {victim} killed after step {step}: {lost} steps lost", flush=True)

    def facts(self) -> dict:
        return {
            "kills": {name: self.kills.count(name) for name in sorted(set(self.kills))},
            "lost_steps": self.lost_steps, "most_lost": self.most_lost,
        }  # fmt: skip


def check_equal(one: Path, other: Path, steps: int) -> None:
    """Failed unless curve and last state are the same bits."""
    curves = curve(one), curve(other)
    if [len(each) for each in curves] != [steps, steps]:
        raise Failed(f"the logs hold {len(curves[0])} and {len(curves[1])} lines, expected {steps}")
    for expected, found in zip(*curves, strict=True):
        if expected != found:
            raise Failed(f"undisturbed (step, loss, norm, lr) {expected}, under kills {found}")
    states = [Checkpoint(newest_first(run / "checkpoints")[0]) for run in (one, other)]
    for array in STATE:
        values = [np.empty(state.facts["count"], np.float32) for state in states]
        for state, out in zip(states, values, strict=True):
            state.read(array, 0, out)
        if values[0].tobytes() != values[1].tobytes():
            raise Failed(f"the last checkpoints' {array} differ")


def summary(facts: dict) -> str:
    kills = ", ".join(f"{name} {count}" for name, count in facts["kills"].items())
    return (
        f"{sum(facts['kills'].values())} kills in {facts['minutes']:g} minutes ({kills}), taken up again each time; "
        f"{facts['lost_steps']} steps lost, at most {facts['most_lost']} by a kill; the loss of step "
        f"{facts['steps']} is {facts['last_loss']:.6f}: this, all other losses and norms, and the last state are the "
        "undisturbed run's, bit for bit"
    )


if __name__ == "__main__":
    main()
