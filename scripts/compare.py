"""Train with several strategies in turn, and draw one comparison.

    python scripts/compare.py --ranks 4 --strategies reduce-bcast,sliced,reduce-scatter
    python scripts/compare.py --ranks 2 --strategies all --out runs/124M -- --model gpt2-124M --steps 5
    python scripts/compare.py --by-time 2.0 --seeds 1,2,3 --strategies ring,tree --nodes 4 --rate 50mbit -- ...

Each strategy is trained --rounds times: all of them in this order, then in the reverse order, and so on. Other load on
the machine then affects all of them, and the spread between rounds shows which differences are noise. The runs of the
first round are OUT/STRATEGY, with the validation loss; the others are OUT/STRATEGY-round-2 and so on.

With --by-time each strategy is trained once with each seed instead, and the seconds to a validation loss are printed
and drawn. Finished runs in --out are not repeated, and interrupted ones are resumed.

The flags after -- go to scripts/train.py in every run. Options of a strategy follow its name: reduce-bcast/dedicated,
hierarchical/bfloat16/overlap; NAME=VALUE becomes train.py's --NAME VALUE. --nodes trains on virtual hosts (as root) in
place of mpirun on this machine or in its allocation. Ctrl-C or SIGTERM also stops the run in progress.
"""

import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from dist.console import open_console
from dist.probe.programs import mpirun_command, mpirun_environment
from gpt2.errors import UserError
from scripts.cluster.hosts import ClusterError
from scripts.cluster.program import end_process, end_with, run_process
from scripts.settings.command_line import Parser
from strategies import CONTROL, STRATEGIES, find, is_auto
from traces import RunError
from traces.read.run_files import read_config, read_log

SCRIPTS = Path(__file__).parent
# A model large enough for its exchange to show, a batch small enough for a laptop.
DEFAULT_TRAINING = ["--n-layer", "3", "--n-head", "6", "--n-embd", "384", "--batch-size", "1", "--steps", "6"]
# Of three equal strategies, one has its four rounds in the first four places once in 165 times.
ROUNDS = 4
GRACE_S = 20  # time to write a checkpoint and to remove the virtual hosts

OPTIONS = {
    "dedicated": ["--server", "dedicated"],
    "bfloat16": ["--wire", "bfloat16"],
    "int8": ["--wire", "int8"],
    "error-feedback": ["--error-feedback"],
    "no-error-feedback": ["--no-error-feedback"],
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
    add("--by-time", type=float, metavar="LOSS", help="compare the seconds of training to this validation loss")
    add("--seeds", type=seeds, metavar="S,...", help="with --by-time: the seeds of the runs of each strategy (1)")
    add("--nodes", type=int, metavar="M", help="train on this many virtual hosts")
    add("--rate", help="with --nodes: rate of every host's port, per direction: 400mbit, 1gbit")
    add("--rounds", type=int, metavar="R", help=f"trainings of each strategy ({ROUNDS}; 1 if flags follow --)")
    arguments = parser.parse_args()
    if arguments.rounds is not None and arguments.rounds < 1:
        parser.error(f"--rounds {arguments.rounds}: expected 1 or more")
    if bool(arguments.nodes) != bool(arguments.rate):
        parser.error("--nodes and --rate go together: give both, or none")
    if arguments.seeds if arguments.by_time is None else arguments.rounds:
        parser.error("--seeds belongs to --by-time, --rounds to a comparison without it: leave one of them out")
    arguments.names = list(STRATEGIES) if arguments.strategies == "all" else arguments.strategies.split(",")
    try:
        for name in arguments.names:  # all of them before the first one is trained
            strategy_flags(name)
    except UserError as error:
        parser.error(str(error))
    arguments.out = arguments.out or Path("runs") / time.strftime("compare-%Y%m%d-%H%M%S")
    end_with(lambda: compare(arguments) if arguments.by_time is None else compare_by_time(arguments))


def seeds(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def compare_by_time(arguments) -> int:
    """Train each strategy with each seed, unless that is done. Print and draw; return the exit code of the last run.

    Raise ClusterError if a finished run cannot be read.
    """
    numbers = arguments.seeds or [1]
    out = hosts_folder(arguments.out, arguments.nodes, arguments.rate)
    try:
        for turn, name in in_turns(arguments.names, len(numbers)):
            seed = numbers[turn - 1]
            more = ["--resume", "--expect-ranks", str(arguments.ranks), "--seed", str(seed)]
            line = train_line(name, seed_folder(out, name, seed), more, arguments)
            print(f"--- {name}, seed {seed}", flush=True)
            if not is_finished(line) and (code := start(line, arguments)):
                return code
        from scripts.reports.by_time import report  # loads matplotlib

        runs = {name: [seed_folder(out, name, seed) for seed in numbers] for name in arguments.names}
        print(f"\n{report(runs, arguments.by_time, out / 'plots' / 'loss-over-time')}", flush=True)
    except RunError as error:
        raise ClusterError(str(error)) from None
    return 0


def is_finished(line: list[str]) -> bool:
    """Return whether the run of this command line has made all its steps. ClusterError: its folder holds another."""
    out = Path(line[line.index("--out") + 1])
    if not (out / "config.json").exists():
        return False
    config = read_config(out)
    if config["command"][1:] != line[2:]:
        raise ClusterError(
            f"{out} holds the run of other flags, {' '.join(config['command'][1:])}: choose another --out"
        )
    has_ended = (out / "summary.json").exists()  # perhaps early, by a signal
    return has_ended and read_log(out)[-1]["step"] == config["settings"]["steps"]


def compare(arguments) -> int:
    """Train and draw; return the exit code of the last command."""
    out = arguments.out
    names = arguments.names
    rounds = arguments.rounds or default_rounds(names, arguments.training)
    for round_number, name in in_turns(names, rounds):
        print(f"--- {name}{f', round {round_number} of {rounds}' if rounds > 1 else ''}", flush=True)
        more = ["--eval-every", "0"] if round_number > 1 else []
        if code := start(train_line(name, run_folder(out, name, round_number), more, arguments), arguments):
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
    return out / (file_name(name) + (f"-round-{round_number}" if round_number > 1 else ""))


def hosts_folder(out: Path, nodes: int | None, rate: str | None) -> Path:
    """Return the folder of the runs on such virtual hosts, `out` without them."""
    return out / f"{nodes}-hosts-{file_name(rate)}" if nodes else out


def seed_folder(out: Path, name: str, seed: int) -> Path:
    return out / f"{file_name(name)}-seed-{seed}"


def file_name(name: str) -> str:
    """Return a file name for a strategy with options: diloco/local-steps=50 gives diloco-local-steps-50."""
    return re.sub(r"[^\w.-]+", "-", name)


def strategy_flags(name: str) -> list[str]:
    """Return the flags of train.py for a name like "hierarchical/bfloat16/overlap". Raise UserError."""
    strategy, *options = name.split("/")
    if not is_auto(strategy):
        find(strategy)
    unknown = [option for option in options if option not in OPTIONS and "=" not in option]
    if unknown:
        raise UserError(f"{name}: no option {unknown[0]!r}, expected {', '.join(OPTIONS)} or NAME=VALUE")
    flags = ["--strategy", strategy, *(["--no-exchange"] if strategy == CONTROL else [])]
    return [*flags, *(flag for option in options for flag in OPTIONS.get(option) or f"--{option}".split("=", 1))]


def train_line(name: str, out: Path, more: list[str], arguments) -> list[str]:
    """Return the command of each rank. more: flags of train.py besides those of the strategy and of the user."""
    own = [*strategy_flags(name), "--out", str(out)]
    return [sys.executable, str(SCRIPTS / "train.py"), *own, *arguments.training, *more]


def start(line: list[str], arguments) -> int:
    """Train once, on virtual hosts with --nodes; return the exit code of mpirun."""
    if arguments.nodes:
        hosts = ["--nodes", arguments.nodes, "--rate", arguments.rate, "--ranks", arguments.ranks, "--"]
        return run([sys.executable, str(SCRIPTS / "virtual_cluster.py"), "run", *map(str, hosts), *line])
    try:
        command = [*mpirun_command(arguments.ranks), *line]
    except FileNotFoundError as error:
        raise SystemExit(f"compare.py: error: {error}") from None
    return run(command, env=mpirun_environment(arguments.ranks))


def run(command: list[str], **options) -> int:
    """Run a command in its own session: Ctrl-C reaches only this program, which then ends the command."""
    options |= {"stdin": subprocess.DEVNULL, "start_new_session": True}
    return run_process(command, partial(end_process, grace_s=GRACE_S), **options)


if __name__ == "__main__":
    open_console()
    main()
