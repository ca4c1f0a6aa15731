"""The current state of a run folder: whether the run is alive, its progress, and the verdict on its last steps.

Everything comes from files that the run writes. The lock tells whether the run is alive: rank 0 touches it every two
seconds. Times come from the run's own records, so a copied folder shows the same times. The exception is the time since
a live run's last step: the difference of two files' modification times, so no clocks of two machines are compared. A
long run takes no longer to read than a short one: traces/read/tails.py reads only the ends of long files.
"""

import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np

from dist.watch.live import POSITION, read_positions
from dist.watch.stalls import Observation
from gpt2.errors import UserError
from scripts.prediction.run_prediction import own_schedule
from scripts.reports.verdict import answer_of, most_bytes_of
from scripts.training.lock_file import LOCK, OLD_S, Lock, is_running, look
from traces.read.analysis import WARM_UP_STEPS
from traces.read.run_files import Gaps, read_config, read_log
from traces.read.runs import read_run
from traces.read.tails import sizes
from traces.record.files import RunError
from traces.record.phases import EXCHANGE, PHASES
from traces.units import seconds_text
from traces.verdict.summary import TimedRun, measure_runs

STARTING = "starting"
TRAINING = "training"
STALLED = "stalled"
FINISHED = "finished"
ENDED = "ended early"
LOG_BYTES = 1_000_000  # some 4,000 lines, read in 50 ms
# A stall: no line in the log for this time plus this many steps. Validations and checkpoints take less.
STALL_S = 10.0
STALL_STEPS = 10


@dataclass(frozen=True)
class RunState:
    """The state of a run at one moment. Times are None if unknown.

    log: rows by step, only the last ones if the log is long. elapsed_s: from the beginning of this start to now, or to
    its last step if the run is over. remaining_s: extrapolated from the steps so far. stall: a sentence, or "".
    measured, answer: the last traced steps and their diagnosis (diagnose.py --json); if None, unmeasured says why.
    """

    path: Path
    config: dict
    log: list[dict]
    word: str
    elapsed_s: float | None
    remaining_s: float | None
    stall: str
    measured: TimedRun | None
    answer: dict | None
    unmeasured: str

    @property
    def steps(self) -> int | None:
        """The number of steps that the whole run will make; None if unknown."""
        return self.config.get("settings", {}).get("steps")


class Watcher:
    """Reads one run folder again and again."""

    def __init__(self, path: Path):
        self.path = path
        self._sizes = None
        self._begun = time.monotonic()
        self._lock = None
        self._lock_moved_at = float("-inf")
        self._positions = Positions(path / "traces")

    def look(self) -> RunState:
        """Return the current state. Raise RunError if no run has written into this folder or begun to."""
        lives, lock = self._lives()
        config = {} if lives and not (self.path / "config.json").exists() else read_config(self.path)
        log = read_log(self.path, Gaps(allowed=True), most_bytes=LOG_BYTES)
        times = Times.of(self.path, config, log, lock if lives else None)
        stall = times.stall() if lives else ""
        held_by = self._positions.look(config)  # at every look: it compares successive positions
        if stall and held_by:
            stall = f"{held_by}; {stall}"
        if lives:
            word = STALLED if stall else TRAINING if times.made else STARTING
        else:
            is_done = times.left in (0, None)  # None: another program, with an unknown number of steps
            word = FINISHED if times.made and is_done and (self.path / "summary.json").exists() else ENDED
        elapsed_s = times.elapsed_s()
        remaining_s = None if word in (FINISHED, ENDED) else times.remaining_s()
        return RunState(self.path, config, log, word, elapsed_s, remaining_s, stall, *self._measure(config))

    def _lives(self) -> tuple[bool, Lock | None]:
        """Return (whether a job trains into the folder, its lock)."""
        try:
            lock = look(self.path / LOCK)
        except UserError as error:
            raise RunError(str(error)) from None
        if lock is None:
            return False, None
        now = time.monotonic()
        if self._lock is not None and lock != self._lock:
            self._lock_moved_at = now
        self._lock = lock
        if is_running(lock) is False:
            return False, lock
        # Either the lock was seen to change or, until it has been watched long enough, this machine's clock says that
        # it is recent.
        is_new = now - self._begun < OLD_S and time.time() - lock.touched_ns * 1e-9 < OLD_S
        return now - self._lock_moved_at < OLD_S or is_new, lock

    def _measure(self, config: dict) -> tuple[TimedRun | None, dict | None, str]:
        """Return (measured, answer, unmeasured) of RunState. Compute them again only if a trace has grown."""
        now = sizes(self.path / "traces")
        if not any(name.endswith(".trace") for name in now):
            off = config.get("settings", {}).get("trace") == "off"
            return None, None, "the run writes no traces (--trace off)" if off else "no traces yet"
        if now == self._sizes:
            return self._measured
        try:
            run = read_run(self.path, allow_missing=True, most_bytes=most_bytes_of(len(config.get("ranks") or [])))
            (measured,) = measure_runs([run], own_schedule)
            self._measured = measured, answer_of(measured.diagnosis), ""
        except RunError:
            # The run is just making its files, or moving them away because it resumes.
            self._measured = None, None, "no traced step is complete on all ranks yet"
        self._sizes = now
        return self._measured


class Positions:
    """Finds the rank that delays the others, from the positions that nodes write every few seconds (dist/watch)."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._observation = None

    def look(self, config: dict) -> str:
        """Return a text like "rank 3 on node3 has been in forward of step 57 for 40 s"; "" if no rank is stalled."""
        found = [read_positions(path) for path in sorted(self._folder.glob("node-*.live"))]
        places = config.get("ranks") or []
        seen = np.concatenate([np.empty(0, POSITION), *found])
        seen = seen[np.unique(seen["rank"], return_index=True)[1]]
        if not len(seen) or seen["rank"].tolist() != list(range(len(places))):  # damaged, or written by another start
            return ""
        names = ("no phase", *PHASES)
        if seen["phase"].min() < 0 or seen["phase"].max() >= len(names):
            return ""
        if self._observation is None:
            meetings, waits = (("wait",), (*EXCHANGE, "recv")) if config.get("mesh") else ((*EXCHANGE, "wait"), ())
            is_meeting, is_wait = (np.array([name in some for name in names]) for some in (meetings, waits))
            self._observation = Observation(is_meeting, STALL_S, STALL_S, is_wait)
        self._observation.look(seen, time.monotonic())
        stall = self._observation.find_stall()
        if stall is None:
            return ""
        rank = stall.ranks[0]
        where = f"{names[stall.phase]} of step {stall.step}"
        what = "shows no sign of life, last seen in" if stall.is_silent else "has been in"
        return f"rank {rank} on {places[rank]['host']} {what} {where} for {stall.since_s:.0f} s"


@dataclass(frozen=True)
class Times:
    """Times of a run, from its own records and from the modification times of its files.

    made, left: steps made in this start of the run and steps left, None if unknown. step_s: the median of the last
    steps, if possible without the first ones, which compile. pace_s: seconds per step, including validations and
    checkpoints. logged_s: from the beginning of this start to its last line in the log. silent_s: since that line, for
    a live run. waiting_s: since the beginning, for a start that has made no step.
    """

    made: int
    left: int | None
    step_s: float | None
    pace_s: float | None
    logged_s: float | None
    silent_s: float
    waiting_s: float | None

    @classmethod
    def of(cls, path: Path, config: dict, log: list[dict], lock: Lock | None) -> "Times":
        """Read the times of a run. lock: a live run's, else None."""
        last = config.get("settings", {}).get("steps")
        resumed = config.get("resumed_step") or 0
        step = log[-1]["step"] if log else 0
        beaten = lock and lock.touched_ns * 1e-9
        started = moment(config.get("started"))
        holder = moment(lock.started) if lock else None
        rows = [row for row in rows_since(log, config) if "elapsed_s" in row]
        if holder and (started is None or holder > started):  # folder and log still belong to an earlier start
            rows = []
        seconds = [row["step_s"] for row in (rows[WARM_UP_STEPS:] or rows)[-100:] if "step_s" in row]
        step_s = float(np.median(seconds)) if seconds else None
        pace_s = None
        logged_s = None
        if rows and step_s is not None:
            first_s = rows[0]["elapsed_s"]
            logged_s = rows[-1]["elapsed_s"]
            pace_s = max(step_s, (logged_s - first_s) / max(1, step - rows[0]["step"]))
        logged = changed_at(path / "log.jsonl")
        return cls(
            made=step - resumed if rows else 0,
            left=None if last is None else max(0, last - step),
            step_s=step_s,
            pace_s=pace_s,
            logged_s=logged_s,
            silent_s=max(0.0, beaten - logged) if beaten and logged else 0.0,
            waiting_s=max(0.0, beaten - holder) if beaten and holder else None,  # times may come from two clocks
        )

    def elapsed_s(self) -> float | None:
        return self.waiting_s if self.logged_s is None else self.logged_s + self.silent_s

    def remaining_s(self) -> float | None:
        """Estimate the seconds of the remaining steps, with validations and checkpoints at the rate so far."""
        return None if self.left is None or self.pace_s is None else self.left * self.pace_s

    def stall(self) -> str:
        """Describe a stall, as in "no step for 34 s, where one takes 0.41 s"; "" if the last step is recent."""
        if not self.made or self.step_s is None or self.left == 0:
            return ""
        if self.silent_s < STALL_S + STALL_STEPS * self.step_s:
            return ""
        return f"no step for {self.silent_s:.0f} s, where one takes {seconds_text(self.step_s)}"


def rows_since(log: list[dict], config: dict) -> list[dict]:
    """Return the log's rows of the start that config.json describes; earlier starts may have run elsewhere."""
    resumed = config.get("resumed_step") or 0
    return [row for row in log if row["step"] > resumed]


def moment(text: str | None) -> float | None:
    """Return a date of config.json or lock.json in seconds since 1970; None if it is not a date."""
    try:
        return datetime.fromisoformat(text).timestamp() if text else None
    except ValueError:
        return None


def changed_at(path: Path) -> float | None:
    """Return a file's modification time in seconds since 1970; None if it cannot be read."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None
