"""Single commands on this machine that meet something odd: how each is run, and what is recorded of it."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dist.probe.programs import find_mpirun, mpirun_environment
from scripts.machine.host import machine, versions
from tests.suites.faults.case import ENDS, ERROR, GOES_ON, MISTAKE, nothing
from tests.suites.faults.log import OF_A_LAUNCHER, OF_THE_JOB
from tests.suites.faults.processes import processes_in, send, wait_until

COMMAND = "command"  # where other rows name their launcher
ROOT = Path(__file__).parents[3]
LIMIT_S, GONE_LIMIT_S = 40, 5
WITHIN_S = 5  # of the cause, and at most so much later than a healthy run ends
TINY = "--n-layer 1 --n-head 2 --n-embd 32 --context 16 --batch-size 2 --threads 1 --eval-every 0"
TRAINED = f"python scripts/train.py {TINY} --steps 6 --checkpoint-every 2 --out run"


def all_is_well(_) -> list[str]:
    return []


@dataclass(frozen=True)
class Command:
    """says: what is odd. command: what is run, in a folder with scripts/ and `run`, a finished run; python and mpirun
    in it are this Python's.

    before(folder): what else is there. during(folder, process): what happens while it runs, from which on seconds
    count. expected: ENDS, with one of `codes` (empty: any but 0) and a line that matches `line`; or GOES_ON.
    check(folder): in words, what is not as it should be afterwards.
    """

    says: str
    command: str
    expected: str = ENDS
    before: Callable[[Path], None] = nothing
    during: Callable[[Path, subprocess.Popen], None] | None = None
    codes: tuple[int, ...] = (MISTAKE,)
    line: str = ERROR
    check: Callable[[Path], list[str]] = all_is_well


class CommandSuite:
    """Runs commands, each in a folder of its own."""

    def __init__(self, folder: Path):
        self._folder = folder
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "scripts").symlink_to(ROOT / "scripts")
        begun = time.time()
        run_here(TRAINED, folder)
        self._healthy_s = time.time() - begun

    def row(self, name: str, command: Command) -> dict:
        """Run it, and say what became of it."""
        folder = self._folder / name
        shutil.copytree(self._folder / "run", folder / "run")
        (folder / "scripts").symlink_to(ROOT / "scripts")
        (folder / "text.txt").write_text("What is said here is read byte by byte.\n" * 50)
        command.before(folder)
        facts = run(command, folder)
        wait_until(lambda: not processes_in(folder), GONE_LIMIT_S)
        left = [f"process {pid} stays" for pid in processes_in(folder)]
        send(signal.SIGKILL, *processes_in(folder))
        facts |= {"case": name, "says": command.says, "launcher": COMMAND, "command": shown(command.command)}
        facts["found"] = [*command.check(folder), *(f"{path.name} stays" for path in folder.rglob(".*.tmp")), *left]
        facts["wrong"] = judge(facts, command, WITHIN_S + (0 if command.during else self._healthy_s))
        return facts | {"outcome": outcome(facts), "left_over": []}

    def made_on(self) -> dict:
        return machine() | versions("numpy", "mpi4py") | {"seconds of a healthy run": round(self._healthy_s, 1)}


def words_of(command: str) -> list[str]:
    """As a shell would split it, with this Python and its mpirun."""
    stands_for = {"python": sys.executable, "mpirun": find_mpirun() or "mpirun"}
    return [stands_for.get(word, word) for word in shlex.split(command)]


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return mpirun_environment(2) | {"PYTHONPATH": str(ROOT), "PATH": path}


def run_here(command: str, folder: Path) -> None:
    """A command that must succeed. CalledProcessError."""
    options = {"cwd": folder, "env": environment(), "stdin": subprocess.DEVNULL, "capture_output": True}
    subprocess.run(words_of(command), check=True, **options)


def run(command: Command, folder: Path) -> dict:
    """Start it, do to it what is to be done, and wait for its end."""
    output, started = folder / "output.txt", time.time()
    with open(output, "w") as file:
        process = subprocess.Popen(
            words_of(command.command), cwd=folder, env=environment(), stdin=subprocess.DEVNULL, stdout=file,
            stderr=file, start_new_session=True,
        )  # fmt: skip
    if command.during:
        command.during(folder, process)
        started = time.time()
    ended = wait_until(lambda: process.poll() is not None, LIMIT_S)
    facts = {"ended": bool(ended), "seconds": round(time.time() - started, 2), "code": process.poll()}
    if not ended:
        send(signal.SIGKILL, *processes_in(folder), process.pid)
        process.wait()
    lines = output.read_text(errors="backslashreplace").replace(f"{folder}/", "").splitlines()
    return facts | {"said": line_of(lines, command), "said_by": "job", "traceback": is_traceback(lines)}


def line_of(lines: list[str], command: Command) -> str:
    """The one that is expected; else one that speaks of a mistake; else the last."""
    patterns = [command.line] if command.expected == ENDS and command.line else []
    found = [line for pattern in (*patterns, OF_THE_JOB, OF_A_LAUNCHER) for line in lines if re.search(pattern, line)]
    return next(iter([*found, *lines[-1:]]), "")


def is_traceback(lines: list[str]) -> bool:
    return any(line.startswith("Traceback") for line in lines)


def judge(row: dict, command: Command, within_s: float) -> list[str]:
    """In words, what is not as it should be of a command that should end within so many seconds."""
    found = [*row["found"], *["a traceback"] * row["traceback"]]
    if not row["ended"]:
        return ["does not end", *found]
    if command.expected == GOES_ON:
        return [*found, *["expected to succeed"] * (row["code"] != 0)]
    if (command.codes and row["code"] not in command.codes) or (not command.codes and row["code"] == 0):
        found.append(f"expected code {' or '.join(map(str, command.codes)) or 'other than 0'}")
    if row["code"] and command.line and not re.search(command.line, row["said"]):
        found.append("another line" if row["said"] else "no line")
    return found + [f"later than {within_s:.1f} s"] * (row["seconds"] > within_s)


def outcome(row: dict) -> str:
    """ "0.8 s, code 2", and in bold what is wrong."""
    code = row["code"] if row["code"] is None or row["code"] >= 0 else 128 - row["code"]
    text = f"{row['seconds']:.1f} s, code {code}" if row["ended"] else "**does not end**"
    return ", ".join([text, *(f"**{words}**" for words in row["wrong"] if words not in text)])


def shown(command: str) -> str:
    """As a page can show it, with bytes that are no UTF-8 in hexadecimal."""
    return command.encode(errors="surrogateescape").decode(errors="backslashreplace").replace(TINY, "...")
