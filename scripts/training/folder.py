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
from scripts.training.launched_ranks import CONFIG, LOG, SUMMARY
from strategies import find
from traces.read.starts import EARLIER
from traces.record.files import RUN_FORMAT

RUNS = Path("runs")
TIME = "%Y-%m-%dT%H:%M:%S%z"
ADVICE = "free some space or check the disk, and start again"


class RunFolder:
    """The run folder, which rank 0 writes. Raise UserError if it cannot be written or already holds a run.

    Nothing in the folder changes before `begin`, which follows the first step: a start without a step alters nothing.

    check_lock: ends the job if another start of the run has taken the folder (RunLock.check). resumed_step: None for a
    new run, else the step after which it resumes.
    """

    def __init__(self, path: Path, check_lock: Callable[[], None], resumed_step: int | None):
        self.path = Path(path)
        self._check_lock = check_lock
        self._resumed_step = resumed_step
        self._started = time.strftime(TIME)
        self._begun = time.monotonic()
        if resumed_step is None:
            check_holds_no_run(self.path)
        for name in (LOG, CONFIG, SUMMARY):
            place_of_file(self.path / name)
        if (checkpoints := self.path / "checkpoints").exists() and not checkpoints.is_dir():
            raise UserError(f"{checkpoints}: not a folder, expected that of a run's checkpoints: choose another --out")
        if checkpoints.exists() and not os.access(checkpoints, os.W_OK | os.X_OK):
            raise UserError(f"{checkpoints}: Permission denied: choose another --out")

    def set_config(self, settings: dict, places: list[dict], mpi_library: str, facts: dict) -> None:
        """Set the content of config.json. places: World.places. facts: what config.json holds besides the settings."""
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
        """Take the folder over for this start, which has made its first step.

        On resume, cut the log after `resumed_step`, and move earlier traces with their config.json to earlier-traces/.
        """
        config = self.path / CONFIG
        is_resumed = self._resumed_step is not None
        self._check_lock()
        with file_errors(self.path, ADVICE):
            if is_resumed:
                self._keep_traces()
                self._clean_up()
            self._config["earlier"] = _earlier_runs(config) if is_resumed and config.exists() else []
            self.add_to_config()
            log = self.path / LOG
            if is_resumed and log.exists():
                lines = read_bytes(log).splitlines(keepends=True)
                with replacing(log) as file:
                    file.writelines(line for line in lines if _step_of(line) <= self._resumed_step)
            (self.path / SUMMARY).unlink(missing_ok=True)  # written by an earlier start, it would claim a finished run
            self._log = open(log, "a" if is_resumed else "w", buffering=1, opener=regular)  # noqa: SIM115
        with file_errors(self.path / "checkpoints", ADVICE):
            (self.path / "checkpoints").mkdir(exist_ok=True)

    def _clean_up(self) -> None:
        """Remove temporary files of killed writers, and rename damaged checkpoints.

        Checkpoints of later steps must be damaged, or the run would have resumed from them. A name like
        step-00000100.damaged keeps --keep from counting them.
        """
        checkpoints.remove_parts(self.path / "checkpoints")
        for checkpoint in checkpoints.newest_first(self.path / "checkpoints"):
            if int(checkpoint.name.removeprefix("step-")) > self._resumed_step:
                checkpoint.rename(_free_name(checkpoint.with_name(f"{checkpoint.name}.damaged")))
        for temporary in self.path.glob(TEMPORARY):
            temporary.unlink()

    def _keep_traces(self) -> None:
        """Move the earlier traces to their own folder."""
        traces = self.path / "traces"
        config = self.path / CONFIG
        if not traces.exists():
            return
        if config.exists():
            # Readers need this config.json to interpret the traces (traces/read/starts.py).
            with replacing(traces / CONFIG) as file:
                file.write(read_bytes(config))
        earlier = self.path / EARLIER
        earlier.mkdir(exist_ok=True)
        # Several starts may resume from the same step; each one's traces are kept.
        kept = traces.rename(_free_name(earlier / f"to-{checkpoints.folder_name(self._resumed_step)}"))
        for live in kept.glob("*.live"):  # this start's nodes watch each other through these files (dist/watch/live.py)
            traces.mkdir(exist_ok=True)
            live.rename(traces / live.name)

    def add_to_config(self, **facts) -> None:
        """Add facts to config.json and write it."""
        self._config |= facts
        write_json(self.path / CONFIG, self._config)

    def log(self, record: dict) -> None:
        """Write one line of log.jsonl and flush it. Raise UserError if that fails.

        The line also gets `elapsed_s`. A loss or norm that is not finite becomes null, as JSON cannot hold it.
        """
        record = record | {"elapsed_s": time.monotonic() - self._begun}
        with file_errors(self.path / LOG, "free some space or check the disk, and continue with --resume"):
            # If the folder has been removed, the open file would still take lines that nobody can read.
            self._check_lock()
            self._log.write(as_json(record) + "\n")

    def write_summary(self, **facts) -> None:
        """Write summary.json, with the facts that are known only at the end of a run."""
        self._check_lock()
        write_json(self.path / SUMMARY, facts)


def confirm_summary(path: Path) -> None:
    """Touch summary.json, which tells --restarts and job scripts that a start ended well.

    A start with no steps left calls this. If the last start was killed before it wrote the file, make an empty one.
    """
    summary = path / SUMMARY
    with file_errors(summary, "check the disk"):
        if summary.exists():
            os.utime(summary)
        else:
            write_json(summary, {})


def check_holds_no_run(path: Path) -> None:
    """Raise UserError if the folder already holds a run."""
    with file_errors(path, "choose another --out"):
        if (path / CONFIG).exists():
            raise UserError(
                f"{path} already holds a run (config.json): choose another --out, remove it, or continue it (--resume)"
            )


def _free_name(path: Path) -> Path:
    """Return the path; if it exists, the first free one of path-2, path-3 and so on."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in count(2))
    return next(one for one in chain([path], numbered) if not os.path.lexists(one))


def _step_of(line: bytes) -> float:
    """Return the step of a line of log.jsonl, infinity if a crash has cut the line."""
    try:
        step = json.loads(line)["step"] if line.endswith(b"\n") else math.inf
    except (ValueError, KeyError, TypeError, RecursionError):
        return math.inf
    return step if type(step) is int else math.inf


def _earlier_runs(config: Path) -> list[dict]:
    """Return the entries of config.json about earlier starts of this run, in order."""
    try:
        last = json.loads(read_bytes(config))
        facts = {name: last[name] for name in ("command", "started", "resumed_step", "code")}
        return [*last["earlier"], facts | {"ranks": len(last["ranks"])}]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []  # a crash has truncated the file; only people read the list, no program depends on it


def default_run_folder(strategy: str, by_auto: bool) -> Path:
    """Return runs/TIME-STRATEGY, or runs/TIME-auto-STRATEGY if auto chose the strategy."""
    return RUNS / f"{time.strftime('%Y%m%d-%H%M%S')}-{'auto-' if by_auto else ''}{find(strategy).name}"


def take_run_folder(out: str | None, strategy: str, by_auto: bool, resume: bool, take_over: bool, world, lock) -> Path:
    """Return the run folder, after taking its lock. by_auto: whether auto chose the strategy. Collective."""
    path = world.comm.bcast(Path(out) if out else default_run_folder(strategy, by_auto))
    with world.together(UserError):
        if world.rank == 0 and not resume:
            check_holds_no_run(path)
    lock.take(path, take_over)
    return path
