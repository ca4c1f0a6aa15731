"""Training whose ranks are killed at random moments, taken up again each time, ends as undisturbed training does.

    python tests/suites/random_kills.py --minutes 30 --every 60 --out runs/kills
    nice -n 19 python tests/suites/random_kills.py --minutes 5 --every 30
    python tests/suites/random_kills.py --minutes 10 --restarts

Two runs of the same settings train side by side. At random moments a rank of one of them, its launcher, or all its
ranks at once (a host that dies) are ended by SIGKILL; then it is started again with --resume at once. With --restarts
nobody does that: train.py --restarts starts the ranks, one of which is killed by SIGKILL each time or, once in four
times, stopped by SIGSTOP.

When the minutes are over, SIGTERM ends the other run after some step R, from a single start; the disturbed run is taken
up for the last time and told to end with step R, too. Then all losses, norms and the last state must be equal, bit for
bit. How fast the machine is decides only how many steps that are. Exit code 1: they do not agree, or a run ended as it
should not have.
"""

import argparse
import json
import random
import signal
import tempfile
import time
from pathlib import Path

import numpy as np

from gpt2.formats.checkpoints import STATE, Checkpoint, newest_first
from scripts.machine.host import machine, versions
from tests.suites.faults.case import INTERRUPTED
from tests.suites.faults.disturbed import Disturbed
from tests.suites.faults.job import CATCH_UP_S, ENDLESS, Failed, Job
from tests.suites.faults.log import curve, last_step, newest_step
from tests.suites.faults.processes import rank_processes, send, wait_until
from tests.suites.faults.supervised import Supervised

# A learning rate that does not depend on --steps, which nobody knows yet; waiting ranks of zero-2 leave their core.
TRAINING = (
    "--strategy", "zero-2", "--schedule", "constant", "--eval-every", 0, "--trace", "off", "--threads", 1,
    "--n-layer", 2, "--n-head", 2, "--n-embd", 64, "--context", 32, "--checkpoint-every", 100, "--batch-size", 4,
)  # fmt: skip
AHEAD = 5  # steps that the undisturbed run is to be ahead of the other, for that to be able to reach its end


def main():
    arguments = parse()
    print(f"--seed {arguments.seed}", flush=True)
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
    parser.add_argument("--ranks", type=int, default=2, help="of both runs (2)")
    parser.add_argument("--restarts", action="store_true", help="kill or stop ranks that train.py --restarts starts")
    parser.add_argument("--seed", type=int, help="of moments and victims (each time another, which is printed)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep both runs in this new folder")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the summary's numbers to this file")
    arguments = parser.parse_args()
    if arguments.seed is None:
        arguments.seed = random.SystemRandom().randrange(10**6)
    return arguments


def compare_runs(arguments, folder: Path) -> dict:
    """Bring both runs to their end, and return the facts for summary(). Failed."""
    (folder / "disturbed").mkdir(parents=True)
    chance, new = random.Random(arguments.seed), Supervised if arguments.restarts else Disturbed
    quiet = Job(folder / "undisturbed", TRAINING, arguments.ranks, ENDLESS)
    disturbed = new(folder / "disturbed", TRAINING, chance, arguments.ranks, arguments.every)
    try:
        disturbed.until(time.monotonic() + 60 * arguments.minutes, quiet)
        steps = end_both(quiet, disturbed)
    finally:
        quiet.kill()
        disturbed.job.kill()
    check_equal(quiet.run, disturbed.run, steps)
    return disturbed.facts() | {
        "minutes": arguments.minutes, "steps": steps, "last_loss": curve(quiet.run)[-1][1], "ranks": arguments.ranks,
        "seed": arguments.seed, "machine": machine() | versions("numpy", "mpi4py"),
    }  # fmt: skip


def end_both(quiet: Job, disturbed: Disturbed) -> int:
    """End both runs after the same step, and return it. Failed."""
    disturbed.end()
    wait_until(lambda: quiet.ended() or last_step(quiet.run) > last_step(disturbed.run) + AHEAD, CATCH_UP_S)
    send(signal.SIGTERM, *rank_processes(quiet.run).values())
    quiet.expect(INTERRUPTED)
    steps = newest_step(quiet.run)
    disturbed.end_at(steps)
    return steps


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
    kinds = ", ".join(f"{name} {count}" for name, count in facts["faults"].items())
    taken_up = "taken up again each time"
    if "restarts" in facts:
        taken_up = f"and no hand: --restarts took the run up {facts['restarts']} times"
    return (
        f"{sum(facts['faults'].values())} faults in {facts['minutes']:g} minutes ({kinds}), {taken_up}; "
        f"{facts['lost_steps']} steps lost, at most {facts['most_lost']} by a fault; the loss of step {facts['steps']} "
        f"is {facts['last_loss']:.6f}: this, all other losses and norms, and the last state are the undisturbed run's, "
        "bit for bit"
    )


if __name__ == "__main__":
    main()
