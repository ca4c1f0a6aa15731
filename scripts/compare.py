"""Train the same run with several strategies, one after another, and draw one comparison.

    python scripts/compare.py --ranks 4 --strategies reduce-bcast,sliced,reduce-scatter
    python scripts/compare.py --ranks 2 --strategies all --out runs/124M -- --model gpt2-124M --steps 5

The flags behind -- go to scripts/train.py in every run. Options of a strategy stand behind its name:
reduce-bcast/dedicated, hierarchical/bfloat16/overlap. Ctrl-C or SIGTERM stops the run as well.
"""

import argparse
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from dist.console import open_console
from dist.probe.programs import mpirun_command, mpirun_environment
from scripts.cluster.program import end_process, end_with, run_process
from strategies import CONTROL, STRATEGIES

SCRIPTS = Path(__file__).parent
# A model large enough for its exchange to show, a batch small enough for a laptop.
DEFAULT_TRAINING = ["--n-layer", "6", "--n-head", "6", "--n-embd", "384", "--batch-size", "1", "--steps", "30"]
GRACE_S = 10  # for ranks that save something when told to stop

OPTIONS = {
    "dedicated": ["--server", "dedicated"],
    "bfloat16": ["--wire", "bfloat16"],
    "error-feedback": ["--error-feedback"],
    "overlap": ["--overlap"],
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="ranks of each run (4)")
    parser.add_argument("--strategies", default="reduce-bcast,sliced,reduce-scatter", help="a list with commas, or all")
    parser.add_argument("--out", type=Path, help="folder of the runs and the figures (runs/compare-TIME)")
    parser.add_argument("training", nargs="*", default=DEFAULT_TRAINING, help="after --: flags of scripts/train.py")
    arguments = parser.parse_args()
    end_with(lambda: compare(arguments))


def compare(arguments) -> int:
    """Train and draw; the exit code of what ended last."""
    out = arguments.out or Path("runs") / time.strftime("compare-%Y%m%d-%H%M%S")
    runs = []
    for name in strategy_names(arguments.strategies):
        runs.append(out / name.replace("/", "-"))
        print(f"--- {name}", flush=True)
        if code := train(name, arguments.ranks, runs[-1], arguments.training):
            return code
    plots = out / "plots"
    if code := run([sys.executable, str(SCRIPTS / "plot.py"), *map(str, runs), "--out", str(plots)]):
        return code
    print(f"pictures: {plots}/, begin with {plots}/{'comparison' if len(runs) > 1 else 'timeline'}.png", flush=True)
    return 0


def strategy_names(text: str) -> list[str]:
    return list(STRATEGIES) if text == "all" else text.split(",")


def strategy_flags(name: str) -> list[str]:
    """The flags of train.py for a name with options, such as "hierarchical/bfloat16/overlap"."""
    strategy, *options = name.split("/")
    unknown = [option for option in options if option not in OPTIONS]
    if unknown:
        raise SystemExit(f"compare.py: error: {name}: no option {unknown[0]!r}, expected {', '.join(OPTIONS)}")
    flags = ["--strategy", strategy, *(["--no-exchange"] if strategy == CONTROL else [])]
    return [*flags, *(flag for option in options for flag in OPTIONS[option])]


def train(name: str, ranks: int, out: Path, training: list[str]) -> int:
    """Make one run; mpirun's exit code."""
    try:
        train_line = [sys.executable, str(SCRIPTS / "train.py"), *strategy_flags(name), "--out", str(out), *training]
        command = [*mpirun_command(ranks), *train_line]
    except FileNotFoundError as error:
        raise SystemExit(f"compare.py: error: {error}") from None
    return run(command, env=mpirun_environment(ranks))


def run(command: list[str], **options) -> int:
    """A command to its end. It is in a session of its own: a terminal's Ctrl-C is for this program, which ends it."""
    options |= {"stdin": subprocess.DEVNULL, "start_new_session": True}
    return run_process(command, partial(end_process, grace_s=GRACE_S), **options)


if __name__ == "__main__":
    open_console()
    main()
