"""Train with several strategies in turn, and draw one comparison.

    python scripts/compare.py --ranks 4 --strategies reduce-bcast,sliced,reduce-scatter
    python scripts/compare.py --ranks 2 --strategies all --out runs/124M -- --model gpt2-124M --steps 5

Each strategy is trained --rounds times: all of them in this order, then in the reverse order, and so on. Other load on
the machine then affects all of them, and the spread between rounds shows which differences are noise. The runs of the
first round are OUT/STRATEGY, with the validation loss; the others are OUT/STRATEGY-round-2 and so on.

The flags after -- go to scripts/train.py in every run. Options of a strategy follow its name: reduce-bcast/dedicated,
hierarchical/bfloat16/overlap. Ctrl-C or SIGTERM also stops the run in progress.
"""

import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from dist.console import open_console
from dist.probe.programs import mpirun_command, mpirun_environment
from gpt2.errors import UserError
from scripts.cluster.program import end_process, end_with, run_process
from scripts.settings.command_line import Parser
from strategies import CONTROL, STRATEGIES, find, is_auto

SCRIPTS = Path(__file__).parent
# A model large enough for its exchange to show, a batch small enough for a laptop.
DEFAULT_TRAINING = ["--n-layer", "3", "--n-head", "6", "--n-embd", "384", "--batch-size", "1", "--steps", "6"]
# Of three equal strategies, one has its four rounds in the first four places once in 165 times.
ROUNDS = 4
GRACE_S = 10  # for ranks that write a checkpoint before they stop

OPTIONS = {
    "dedicated": ["--server", "dedicated"],
    "bfloat16": ["--wire", "bfloat16"],
    "error-feedback": ["--error-feedback"],
    "overlap": ["--overlap"],
}


def main():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--ranks", type=int, default=4, metavar="N", help="ranks of each run (4)")
    strategies = "reduce-bcast,sliced,reduce-scatter"
    add("--strategies", default=strategies, metavar="all|LIST", help=f"strategies separated by commas ({strategies})")
    add("--out", type=Path, metavar="DIR", help="folder for runs and figures (runs/compare-TIME)")
    add("training", metavar="FLAG", nargs="*", default=DEFAULT_TRAINING, help="after --: flags of scripts/train.py")
    add("--rounds", type=int, metavar="R", help=f"trainings of each strategy ({ROUNDS}; 1 if flags follow --)")
    arguments = parser.parse_args()
    if arguments.rounds is not None and arguments.rounds < 1:
        parser.error(f"--rounds {arguments.rounds}: expected 1 or more")
    arguments.names = list(STRATEGIES) if arguments.strategies == "all" else arguments.strategies.split(",")
    try:
        for name in arguments.names:  # all of them before the first one is trained
            strategy_flags(name)
    except UserError as error:
        parser.error(str(error))
    end_with(lambda: compare(arguments))


def compare(arguments) -> int:
    """Train and draw; return the exit code of the last command."""
    out = arguments.out or Path("runs") / time.strftime("compare-%Y%m%d-%H%M%S")
    names = arguments.names
    rounds = arguments.rounds or default_rounds(names, arguments.training)
    for round_number, name in in_turns(names, rounds):
        print(f"--- {name}{f', round {round_number} of {rounds}' if rounds > 1 else ''}", flush=True)
        training = [*arguments.training, *(["--eval-every", "0"] if round_number > 1 else [])]
        if code := train(name, arguments.ranks, run_folder(out, name, round_number), training):
            return code
    plots = out / "plots"
    runs = [str(run_folder(out, name, at + 1)) for at in range(rounds) for name in names]
    if code := run([sys.executable, str(SCRIPTS / "plot.py"), *runs, "--rounds", str(rounds), "--out", str(plots)]):
        return code
    print(f"pictures: {plots}/, begin with {plots}/{'comparison' if len(names) > 1 else 'timeline'}.png", flush=True)
    return 0


def default_rounds(names: list[str], training: list[str]) -> int:
    """Return the number of rounds: 1 for a single strategy, and if the user's training may take hours."""
    return ROUNDS if len(names) > 1 and training == DEFAULT_TRAINING else 1


def in_turns(names: list[str], rounds: int) -> list[tuple[int, str]]:
    """Return (round, name), rounds from 1: A B C, then C B A, so that a steady drift affects all equally."""
    return [(at + 1, name) for at in range(rounds) for name in (reversed(names) if at % 2 else names)]


def run_folder(out: Path, name: str, round_number: int) -> Path:
    return out / (name.replace("/", "-") + (f"-round-{round_number}" if round_number > 1 else ""))


def strategy_flags(name: str) -> list[str]:
    """Return the flags of train.py for a name like "hierarchical/bfloat16/overlap". Raise UserError."""
    strategy, *options = name.split("/")
    if not is_auto(strategy):
        find(strategy)
    unknown = [option for option in options if option not in OPTIONS]
    if unknown:
        raise UserError(f"{name}: no option {unknown[0]!r}, expected {', '.join(OPTIONS)}")
    flags = ["--strategy", strategy, *(["--no-exchange"] if strategy == CONTROL else [])]
    return [*flags, *(flag for option in options for flag in OPTIONS[option])]


def train(name: str, ranks: int, out: Path, training: list[str]) -> int:
    """Train once; return the exit code of mpirun."""
    try:
        train_line = [sys.executable, str(SCRIPTS / "train.py"), *strategy_flags(name), "--out", str(out), *training]
        command = [*mpirun_command(ranks), *train_line]
    except FileNotFoundError as error:
        raise SystemExit(f"compare.py: error: {error}") from None
    return run(command, env=mpirun_environment(ranks))


def run(command: list[str], **options) -> int:
    """Run a command in its own session: Ctrl-C reaches only this program, which then ends the command."""
    options |= {"stdin": subprocess.DEVNULL, "start_new_session": True}
    return run_process(command, partial(end_process, grace_s=GRACE_S), **options)


if __name__ == "__main__":
    open_console()
    main()
