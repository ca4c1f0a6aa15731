"""The run folder: config.json, log.jsonl, summary.json; written by rank 0."""

import json
import math
import os
import sys
import time
from collections.abc import Callable
from itertools import chain, count
from pathlib import Path

from gpt2.errors import UserError, file_errors
from gpt2.files import TEMPORARY, as_json, place_of_file, read_bytes, regular, replacing, write_json
from gpt2.formats import checkpoints
from scripts.machine.host import machine, versions
from scripts.training.launched import CONFIG, LOG, SUMMARY
from scripts.training.report import warn
from strategies import find
from traces.read.starts import EARLIER
from traces.record.files import RUN_FORMAT

RUNS = Path("runs")
TIME = "%Y-%m-%dT%H:%M:%S%z"
ADVICE = "free some space or see to the disk, and start again"


class RunFolder:
    """The run folder as rank 0 writes it. UserError if it cannot be written, or holds a run already.

    Nothing in the folder changes before `begin`, which follows the first step: a start that makes no step, whether it
    fails or has none to make, leaves the folder as it was.

    check_lock: ends the job if another start of the run has taken the folder (RunLock.check). resumed_step: None for a
    new run, else the step after which the run goes on. tensorboard: whether the log is also written to RUN/tensorboard.
    """

    def __init__(self, path: Path, check_lock: Callable[[], None], resumed_step: int | None, tensorboard: bool = False):
        self.path, self._check_lock, self._resumed_step = Path(path), check_lock, resumed_step
        self._tensorboard, self._events = tensorboard, None
        self._started, self._begun = time.strftime(TIME), time.monotonic()
        if resumed_step is None:
            check_holds_no_run(self.path)
        for name in (LOG, CONFIG, SUMMARY):
            place_of_file(self.path / name)
        if (checkpoints := self.path / "checkpoints").exists() and not checkpoints.is_dir():
            raise UserError(f"{checkpoints}: not a folder, expected that of a run's checkpoints: choose another --out")
        if checkpoints.exists() and not os.access(checkpoints, os.W_OK | os.X_OK):
            raise UserError(f"{checkpoints}: Permission denied: choose another --out")

    def set_config(self, settings: dict, places: list[dict], mpi_library: str, facts: dict) -> None:
        """Keep what config.json will say. places: as World.places. facts: of this run, beside its settings."""
        self._config = {
            "format": RUN_FORMAT,
            "settings": settings,
            "command": sys.argv,
            "started": self._started,
            "versions": versions("gpt2-mpi", "numpy", "numba", "mpi4py"),
            "machine": machine(),
            "mpi_library": mpi_library,
            "ranks": places,
            **facts,
        }

    def begin(self) -> None:
        """Make the folder this start's, now that it has made a step.

        The log of a run that goes on loses the lines after `resumed_step`, and all traces so far move to
        earlier-traces/, with their config.json.
        """
        config, is_resumed = self.path / CONFIG, self._resumed_step is not None
        self._check_lock()
        with file_errors(self.path, ADVICE):
            if is_resumed:
                self._keep_traces()
                self._clean_up()
            self._config["earlier"] = _earlier_runs(config) if is_resumed and config.exists() else []
            self.add_to_config()
            if is_resumed:
                self._shorten_log()
            (self.path / SUMMARY).unlink(missing_ok=True)  # an earlier start's: it says that all steps are done
            self._log = open(self.path / LOG, "a" if is_resumed else "w", buffering=1, opener=regular)  # noqa: SIM115
        with file_errors(self.path / "checkpoints", ADVICE):
            (self.path / "checkpoints").mkdir(exist_ok=True)
        if self._tensorboard:
            from scripts.reports.event_files import EventFile  # what few runs need

            self._events = EventFile(self.path / "tensorboard", (self._resumed_step or 0) + 1)

    def _clean_up(self) -> None:
        """Remove what writers that were killed have left.

        Checkpoints of later steps cannot be read, or the run would have gone on from them. They are renamed to
        step-00000100.damaged, as --keep must not count them.
        """
        checkpoints.remove_parts(self.path / "checkpoints")
        for checkpoint in checkpoints.newest_first(self.path / "checkpoints"):
            if int(checkpoint.name.removeprefix("step-")) > self._resumed_step:
                checkpoint.rename(_free_name(checkpoint.with_name(f"{checkpoint.name}.damaged")))
        for temporary in self.path.glob(TEMPORARY):
            temporary.unlink()

    def _shorten_log(self) -> None:
        log = self.path / LOG
        if log.exists():
            kept = [line for line in read_bytes(log).splitlines(keepends=True) if _step_of(line) <= self._resumed_step]
            with replacing(log) as file:
                file.writelines(kept)

    def _keep_traces(self) -> None:
        """Move the traces so far to a folder of their own."""
        traces, config = self.path / "traces", self.path / CONFIG
        if not traces.exists():
            return
        if config.exists():
            # It says whose traces these are, and what they were measured on (traces/read/starts.py).
            with replacing(traces / CONFIG) as file:
                file.write(read_bytes(config))
        earlier = self.path / EARLIER
        earlier.mkdir(exist_ok=True)
        # Several starts may go on from the same step: the traces of each are kept.
        kept = traces.rename(_free_name(earlier / f"to-{checkpoints.folder_name(self._resumed_step)}"))
        for live in kept.glob("*.live"):  # where the nodes of this start see each other (dist/watch/live.py)
            traces.mkdir(exist_ok=True)
            live.rename(traces / live.name)

    def add_to_config(self, **facts) -> None:
        """Write config.json, with what has become known of this run."""
        self._config |= facts
        write_json(self.path / CONFIG, self._config)

    def log(self, record: dict) -> None:
        """Write one line of log.jsonl; the file system has it on return. UserError: it cannot be written.

        The line gets `elapsed_s`, too. A loss or norm that is not finite becomes null, as JSON has no word for it.
        """
        record = record | {"elapsed_s": time.monotonic() - self._begun}
        with file_errors(self.path / LOG, "free some space or see to the disk, and go on with --resume"):
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
        write_json(self.path / SUMMARY, facts)


def confirm_summary(path: Path) -> None:
    """Give summary.json the present time: the sign for --restarts and job scripts that a start ended well.

    For a start that has no step to make. Where the last start was killed before it wrote one, an empty one is made.
    """
    summary = path / SUMMARY
    with file_errors(summary, "see to the disk"):
        if summary.exists():
            os.utime(summary)
        else:
            write_json(summary, {})


def check_holds_no_run(path: Path) -> None:
    """UserError if a new run cannot begin in this folder, as it holds one."""
    with file_errors(path, "choose another --out"):
        if (path / CONFIG).exists():
            raise UserError(
                f"{path} already holds a run (config.json): choose another --out, remove it, or go on with it "
                "(--resume)"
            )


def _free_name(path: Path) -> Path:
    """Return the path, or where something has that name the first free one of path-2, path-3 and so on."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in count(2))
    return next(one for one in chain([path], numbered) if not os.path.lexists(one))


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
        facts = {name: last[name] for name in ("command", "started", "resumed_step", "code")}
        return [*last["earlier"], facts | {"ranks": len(last["ranks"])}]
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
