"""The run folder: config.json, log.jsonl, summary.json; written by rank 0."""

import json
import math
import sys
import time
from collections.abc import Callable
from itertools import chain, count
from pathlib import Path

from gpt2.errors import UserError, file_errors
from gpt2.files import TEMPORARY, as_json, read_bytes, regular, replacing
from gpt2.formats import checkpoints
from scripts.machine.host import machine, versions
from scripts.training.report import warn
from strategies import find
from traces.read.starts import EARLIER

RUNS = Path("runs")


class RunFolder:
    """Rank 0's hand on the folder. Making one raises UserError if it cannot be written, or holds a run already.

    check_lock: ends the job if another start of the run has taken the folder (RunLock.check). resumed_step: None for a
    new run, else the step after which the run goes on. The log then keeps the lines up to that step and drops the later
    ones; all traces so far move to earlier-traces/, with their config.json. tensorboard: whether the log is also
    written to RUN/tensorboard.
    """

    def __init__(self, path: Path, check_lock: Callable[[], None], resumed_step: int | None, tensorboard: bool = False):
        self.path, self._check_lock, self._earlier = Path(path), check_lock, []
        with file_errors(self.path, "choose another --out"):
            if resumed_step is not None:
                self._take_up(resumed_step)
            else:
                check_holds_no_run(self.path)
            (self.path / "summary.json").unlink(missing_ok=True)  # an earlier run's: it says that all steps are done
            mode = "w" if resumed_step is None else "a"
            self._log = open(self.path / "log.jsonl", mode, buffering=1, opener=regular)  # noqa: SIM115
        with file_errors(self.path / "checkpoints", "choose another --out"):
            (self.path / "checkpoints").mkdir(exist_ok=True)
        self._events = None
        if tensorboard:
            from scripts.reports.event_files import EventFile  # what few runs need

            self._events = EventFile(self.path / "tensorboard", (resumed_step or 0) + 1)

    def _take_up(self, step: int) -> None:
        """Bring the folder to what it was after that step."""
        checkpoints.remove_parts(self.path / "checkpoints")
        for temporary in self.path.glob(TEMPORARY):  # of a writer that was killed
            temporary.unlink()
        log, traces, config = self.path / "log.jsonl", self.path / "traces", self.path / "config.json"
        if log.exists():
            kept = [line for line in read_bytes(log).splitlines(keepends=True) if _step_of(line) <= step]
            with replacing(log) as file:
                file.writelines(kept)
        if config.exists():
            self._earlier = _earlier_runs(config)
        if traces.exists():
            if config.exists():
                # It says whose traces these are, and what they were measured on (traces/read/starts.py).
                with replacing(traces / "config.json") as file:
                    file.write(read_bytes(config))
            earlier = self.path / EARLIER
            earlier.mkdir(exist_ok=True)
            # Several starts may go on from the same step: the traces of each are kept.
            name = f"to-{checkpoints.folder_name(step)}"
            more = (f"{name}-{number}" for number in count(2))
            traces.rename(next(earlier / one for one in chain([name], more) if not (earlier / one).exists()))

    def write_config(self, settings: dict, places: list[dict], mpi_library: str, facts: dict) -> None:
        """config.json. places: each rank's, as World.places. facts: of this run, beside its settings."""
        self._config = {
            "settings": settings,
            "command": sys.argv,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "versions": versions("gpt2-mpi", "numpy", "numba", "mpi4py"),
            "machine": machine(),
            "mpi_library": mpi_library,
            "ranks": places,
            "earlier": self._earlier,
        }
        self.add_to_config(**facts)

    def add_to_config(self, **facts) -> None:
        """Write config.json again, with what has become known of this run."""
        self._config |= facts
        with file_errors(self.path, "choose another --out"), replacing(self.path / "config.json") as file:
            file.write(f"{as_json(self._config, indent=1)}\n".encode())

    def log(self, record: dict) -> None:
        """Write one line of log.jsonl; the file system has it on return. UserError: it cannot be written.

        A loss or norm that is not finite becomes null, as JSON has no word for it.
        """
        with file_errors(self.path / "log.jsonl", "free some space or see to the disk, and go on with --resume"):
            # The open file would still take lines if somebody has removed the folder, and nobody would ever read them.
            self._check_lock()
            self._log.write(as_json(record) + "\n")
        if self._events:
            try:
                self._events.add(record, time.time())
            except UserError as error:  # the log has it all
                self._events = None
                warn(f"{error}; --tensorboard is off from here on, training goes on")

    def write_summary(self, **facts) -> None:
        """summary.json: what is known only at the end of a run."""
        self._check_lock()
        with replacing(self.path / "summary.json") as file:
            file.write(f"{as_json(facts, indent=1)}\n".encode())


def check_holds_no_run(path: Path) -> None:
    """UserError if a new run cannot begin in this folder, as it holds one."""
    with file_errors(path, "choose another --out"):
        if (path / "config.json").exists():
            raise UserError(
                f"{path} already holds a run (config.json): choose another --out, remove it, or go on with it "
                "(--resume)"
            )


def _step_of(line: bytes) -> float:
    """The step of a line of log.jsonl, or infinity if a crash has cut the line."""
    try:
        step = json.loads(line)["step"] if line.endswith(b"\n") else math.inf
    except (ValueError, KeyError, TypeError, RecursionError):
        return math.inf
    return step if type(step) is int else math.inf


def _earlier_runs(config: Path) -> list[dict]:
    """What config.json says of the runs of this folder so far, in their order."""
    try:
        last = json.loads(read_bytes(config))
        facts = {name: last[name] for name in ("command", "started", "resumed_step")} | {"ranks": len(last["ranks"])}
        facts |= {name: last[name] for name in ("code",) if name in last}  # starts of before do not say it
        return [*last["earlier"], facts]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []  # a crash has cut it; the list is for people to read, and no run depends on it


def default_run_folder(strategy: str, by_auto: bool) -> Path:
    """runs/TIME-STRATEGY, of a strategy that --strategy names or that a file holds; TIME-auto-STRATEGY of auto's."""
    return RUNS / f"{time.strftime('%Y%m%d-%H%M%S')}-{'auto-' if by_auto else ''}{find(strategy).name}"


def take_run_folder(out: str | None, strategy: str, by_auto: bool, resume: bool, take_over: bool, world, lock) -> Path:
    """The path of the run folder, with this run's lock in it. by_auto: whether auto chose the strategy. Collective."""
    path = world.comm.bcast(Path(out) if out else default_run_folder(strategy, by_auto))
    with world.together(UserError):
        if world.rank == 0 and not resume:
            check_holds_no_run(path)
    lock.take(path, take_over)
    return path
