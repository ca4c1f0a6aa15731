"""Training under faults at random moments, taken up again each time, ends as training that nobody disturbed does.

    python tests/suites/random_kills.py --minutes 30 --every 60 --out runs/kills
    sudo python tests/suites/random_kills.py --minutes 60 --ranks 1,2,3,4 --faults all
    nice -n 19 python tests/suites/random_kills.py --minutes 5 --every 30
    python tests/suites/random_kills.py --minutes 10 --restarts

Two runs of the same settings train side by side. One of them meets a fault at random moments, of these:

kill        a rank, the launcher, or all ranks at once (a host that dies) are ended by SIGKILL
term        SIGTERM to all ranks: they end with code 75, after a checkpoint
usr1        SIGUSR1 to one rank: it goes on, after a checkpoint
disk        the run's disk, a small one of its own, is full for a while (as root)
second      another job is started in the same folder: it ends at once, with code 2, and the first goes on

Where it has ended it is started again with --resume at once. With --restarts nobody does that: train.py --restarts
starts the ranks, one of which is killed by SIGKILL each time or, once in four times, stopped by SIGSTOP.

When the minutes are over, SIGTERM ends the other run after some step R, from a single start; the disturbed run is taken
up for the last time and told to end with step R, too. Then all losses, norms and the last state must be equal, bit for
bit. With several numbers in --ranks each start draws one of them: sums are then made in another order, so that losses
must agree to 1e-6 of themselves. How fast the machine is decides only how many steps that are. Exit code 1: they do not
agree, or a run ended as it should not have.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np

from gpt2.formats.checkpoints import STATE, Checkpoint, newest_first
from scripts.machine.host import machine, versions
from tests.suites.faults.case import INTERRUPTED
from tests.suites.faults.disk import own_disk
from tests.suites.faults.disturbed import FAULTS, Disturbed
from tests.suites.faults.job import CATCH_UP_S, ENDLESS, Failed, Job, Settings
from tests.suites.faults.log import curve, last_step, newest_step
from tests.suites.faults.processes import rank_processes, send, wait_until
from tests.suites.faults.suite import names_in
from tests.suites.faults.supervised import Supervised

# A learning rate that does not depend on --steps, which nobody knows yet; waiting ranks of zero-2 leave their core.
TRAINING = ("--strategy", "zero-2", "--schedule", "constant", "--eval-every", 0, "--trace", "off", "--threads", 1)
SMALL = (*TRAINING, "--n-layer", 2, "--n-head", 2, "--n-embd", 64, "--context", 32, "--checkpoint-every", 100)
# Steps so long and so small that rounding errors, which AdamW amplifies from step to step, stay far below AGREE.
LARGER = (
    *TRAINING, "--n-layer", 4, "--n-head", 4, "--n-embd", 128, "--context", 128, "--checkpoint-every", 20, "--lr", 1e-4,
)  # fmt: skip
# {ranks: sequences of a rank, micro-steps}: the same 24 windows a step on any of them.
BATCHES = {1: (4, 6), 2: (4, 3), 3: (4, 2), 4: (3, 2)}
AGREE = 1e-6  # of a loss
DISK = "size=64m"  # three checkpoints of LARGER, and more
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
    parser.add_argument("--minutes", type=float, default=30, help="how long to disturb (30)")
    parser.add_argument("--every", type=float, default=60, metavar="S", help="seconds between faults, on average (60)")
    parser.add_argument("--ranks", type=rank_counts, default=[2], help="of each start one of these is drawn (2)")
    parser.add_argument("--faults", type=fault_names, default=["kill"], help=f"of {', '.join(FAULTS)}, or all (kill)")
    parser.add_argument("--restarts", action="store_true", help="kill or stop ranks that train.py --restarts starts")
    parser.add_argument("--seed", type=int, help="of moments and victims (each time another, which is printed)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep both runs in this new folder")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the summary's numbers to this file")
    arguments = parser.parse_args()
    if arguments.restarts and (len(arguments.ranks) > 1 or arguments.faults != ["kill"]):
        parser.error("--restarts with --faults or several numbers in --ranks, expected without")
    if arguments.seed is None:
        arguments.seed = random.SystemRandom().randrange(10**6)
    return arguments


def rank_counts(text: str) -> list[int]:
    """An argparse type: "1,2,3"."""
    return [int(word) for word in names_in({str(ranks): None for ranks in BATCHES})(text)]


def fault_names(text: str) -> list[str]:
    """An argparse type: "kill,term" or "all"."""
    return list(FAULTS) if text == "all" else names_in(FAULTS)(text)


def compare_runs(arguments, folder: Path) -> dict:
    """Bring both runs to their end, and return the facts for summary(). Failed."""
    (folder / "disturbed").mkdir(parents=True)
    faults, is_exact = possible(arguments.faults), len(arguments.ranks) == 1
    settings = Settings(SMALL, {arguments.ranks[0]: (4, 1)}) if is_exact else Settings(LARGER, BATCHES)
    chance = random.Random(arguments.seed)
    with own_disk(folder / "disturbed", DISK, keep=arguments.out) if "disk" in faults else nullcontext():
        quiet = Job(folder / "undisturbed", settings, arguments.ranks[0], ENDLESS)
        disturbed = new_disturbed(arguments, folder / "disturbed", settings, chance, faults)
        try:
            disturbed.until(time.monotonic() + 60 * arguments.minutes, quiet)
            steps = end_both(quiet, disturbed)
        finally:
            quiet.kill()
            disturbed.job.kill()
        if is_exact:
            check_equal(quiet.run, disturbed.run, steps)
        difference = largest_difference(quiet.run, disturbed.run, steps)
    return disturbed.facts() | {
        "minutes": arguments.minutes, "steps": steps, "last_loss": curve(quiet.run)[-1][1], "ranks": arguments.ranks,
        "difference": difference, "is_exact": is_exact, "seed": arguments.seed,
        "machine": machine() | versions("numpy", "mpi4py"),
    }  # fmt: skip


def new_disturbed(arguments, folder: Path, settings: Settings, chance, faults: list[str]) -> Disturbed:
    if arguments.restarts:
        return Supervised(folder, settings, chance, arguments.ranks, arguments.every)
    named = {name: FAULTS[name] for name in faults}
    return Disturbed(folder, settings, chance, arguments.ranks, named, arguments.every)


def possible(faults: list[str]) -> list[str]:
    """Without what this user cannot do, which is said."""
    if "disk" in faults and os.geteuid() != 0:
        print("random_kills.py: no full disks: only root can mount a small one", file=sys.stderr, flush=True)
        return [name for name in faults if name != "disk"]
    return faults


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


def largest_difference(one: Path, other: Path, steps: int) -> float:
    """Of two losses of the same step, as a part of the loss. Failed where it is more than AGREE."""
    curves = curve(one), curve(other)
    numbers = [[line[0] for line in each] for each in curves]
    if numbers != [[*range(1, steps + 1)]] * 2:
        raise Failed(f"the logs hold {len(curves[0])} and {len(curves[1])} lines, expected each step to {steps} once")
    differences = [abs(b[1] / a[1] - 1) for a, b in zip(*curves, strict=True)]
    for step, found in enumerate(differences, 1):
        if not found <= AGREE:  # a NaN is not
            raise Failed(f"the losses of step {step} differ by {found:.1e} of themselves, expected at most {AGREE:g}")
    return max(differences)


def summary(facts: dict) -> str:
    kinds = ", ".join(f"{name} {count}" for name, count in facts["faults"].items())
    *others, last = map(str, facts["ranks"])
    ranks = f" on {', '.join(others)} or {last} ranks" if others else ""
    taken_up = "taken up again each time"
    if "restarts" in facts:
        taken_up = f"and no hand: --restarts took the run up {facts['restarts']} times"
    text = (
        f"{sum(facts['faults'].values())} faults in {facts['minutes']:g} minutes ({kinds}), {taken_up}"
        f"{ranks}; {facts['lost_steps']} steps lost, at most {facts['most_lost']} by a fault; "
    )
    if facts["second_s"]:
        text += f"a second job was refused after {max(facts['second_s']):.1f} s at most; "
    text += f"the loss of step {facts['steps']} is {facts['last_loss']:.6f}: "
    if facts["is_exact"]:
        return text + "this, all other losses and norms, and the last state are the undisturbed run's, bit for bit"
    return text + f"all losses are the undisturbed run's, the largest difference is {facts['difference']:.1e} of a loss"


if __name__ == "__main__":
    main()
