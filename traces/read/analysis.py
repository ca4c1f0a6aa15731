"""Where the time of a run's steps went: seconds per step, rank and phase, their medians, the summary of a run.

All of it uses the steps that are complete on every rank, without the warm-up.
"""

from dataclasses import dataclass
from functools import reduce

import numpy as np

from traces.read.runs import Run
from traces.read.waiting import find_waits
from traces.record.files import RunError
from traces.record.phases import EXCHANGE, INDEX, NAMES, PHASES, STEP

WARM_UP_STEPS = 2
# Fewer steps than this after the warm-up say less than a warm-up step among them disturbs.
FEWEST_STEPS = 3


@dataclass(frozen=True)
class StepTimes:
    """A run's steps, taken apart. S steps, R ranks, P = len(NAMES) phases in the order of NAMES.

    steps: (S,) int64, step numbers, rising
    dropped: number of warm-up steps left out before them
    start_ns, end_ns: (S, R) int64, each rank's envelope of the step on rank 0's clock
    seconds: (S, R, P) float64, of the phases inside the envelope; the last phase is the envelope itself
    waiting: (S, R, P) float64, the part of `seconds` spent waiting for another rank (exchange phases only)
    waits: per rank an int64 array as long as its records, nanoseconds waited
    """

    steps: np.ndarray
    dropped: int
    start_ns: np.ndarray
    end_ns: np.ndarray
    seconds: np.ndarray
    waiting: np.ndarray
    waits: list[np.ndarray]

    @property
    def step_seconds(self) -> np.ndarray:
        """(S,) float64: each step's duration, the mean over ranks."""
        return self.seconds[:, :, INDEX[STEP]].mean(axis=1)

    def representative(self) -> int:
        """Index into `steps` of the step whose duration is nearest to the median."""
        return int(np.argmin(np.abs(self.step_seconds - np.median(self.step_seconds))))


def measure(run: Run, warm_up: int = WARM_UP_STEPS) -> StepTimes:
    """Take a run's steps apart. The first `warm_up` traced steps are left out where enough others remain."""
    steps = _complete_steps(run)
    dropped = warm_up if len(steps) >= warm_up + FEWEST_STEPS else 0
    steps = steps[dropped:]
    start, end = _envelopes(run, steps)
    waits = find_waits(run)
    seconds = np.empty((len(steps), len(run.ranks), len(NAMES)))
    waiting = np.empty_like(seconds)
    for rank, trace in enumerate(run.ranks):
        records = trace.records
        cell = cells(records, steps, start[:, rank], end[:, rank])
        seconds[:, rank] = sum_by_cell(cell, records["end"] - records["start"], len(steps)) * 1e-9
        waiting[:, rank] = sum_by_cell(cell, waits[rank], len(steps)) * 1e-9
    return StepTimes(steps, dropped, start, end, seconds, waiting, waits)


def _complete_steps(run: Run) -> np.ndarray:
    """(S,) numbers of the steps whose envelope every rank has written."""
    per_rank = [trace.records["step"][trace.records["phase"] == INDEX[STEP]] for trace in run.ranks]
    steps = reduce(np.intersect1d, per_rank).astype(np.int64)
    if not len(steps):
        raise RunError(
            f"{run.path / 'traces'}: no step is complete on all {len(run.ranks)} ranks; train for a few steps more, "
            f"and check that --trace FROM:TO lies inside --steps"
        )
    return steps


def _envelopes(run: Run, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Start and end in ns of each step on each rank: two (S, R) int64 arrays."""
    bounds = np.empty((2, len(steps), len(run.ranks)), np.int64)
    for rank, trace in enumerate(run.ranks):
        envelopes = trace.records[trace.records["phase"] == INDEX[STEP]]
        chosen = envelopes[np.searchsorted(envelopes["step"], steps)]
        bounds[:, :, rank] = chosen["start"], chosen["end"]
    return bounds[0], bounds[1]


def cells(records: np.ndarray, steps: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Each record's place in a flat (S, P) table; one place past its end for records outside the steps' envelopes."""
    index = np.searchsorted(steps, records["step"]).clip(max=len(steps) - 1)
    inside = (records["step"] == steps[index]) & (records["start"] >= start[index]) & (records["end"] <= end[index])
    return np.where(inside, index * len(NAMES) + records["phase"], len(steps) * len(NAMES))


def sum_by_cell(cell: np.ndarray, amounts: np.ndarray, steps: int) -> np.ndarray:
    """(S, P) sums of what belongs to the records in `cell`."""
    size = steps * len(NAMES)
    return np.bincount(cell, amounts, minlength=size + 1)[:size].reshape(steps, len(NAMES))


@dataclass(frozen=True)
class MeasuredRun:
    """A run with everything the plots need: its StepTimes and its `summary`, the label unlike any other run's."""

    run: Run
    times: StepTimes
    figures: dict

    @property
    def label(self) -> str:
        return self.figures["label"]


def measure_runs(runs: list[Run]) -> list[MeasuredRun]:
    """Measure several runs; runs of equal label get their folder's name added to it."""
    labels = [run.label for run in runs]
    measured = []
    for run in runs:
        times = measure(run)
        label = run.label if labels.count(run.label) == 1 else f"{run.label} ({run.path.resolve().name})"
        measured.append(MeasuredRun(run, times, summary(run, times) | {"label": label}))
    return measured


def summary(run: Run, times: StepTimes | None = None) -> dict:
    """The figures of a run, ready for JSON; times in milliseconds.

    Mean over ranks first, median over steps then, so that the phases and `other_ms` add up to `step_ms`. `phases_ms`
    holds the phases that occur, exchanges with their waiting; `waiting_ms` the waiting alone; shares are of `step_ms`.
    """
    times = times or measure(run)
    step_ms = float(np.median(times.step_seconds)) * 1e3
    phases = _medians_ms(times.seconds, PHASES)
    waiting = _medians_ms(times.waiting, EXCHANGE)
    return {
        "label": run.label,
        "strategy": run.strategy,
        "path": str(run.path),
        "ranks": len(run.ranks),
        "nodes": len({trace.identity["node"] for trace in run.ranks}),
        "steps": len(times.steps),
        "warm_up_dropped": times.dropped,
        "step_ms": step_ms,
        "phases_ms": phases,
        "waiting_ms": waiting,
        "other_ms": max(0.0, step_ms - sum(phases.values())),
        "exchange_share": sum(phases.get(name, 0.0) for name in EXCHANGE) / step_ms,
        "waiting_share": sum(waiting.values()) / step_ms,
        **rates(run, times),
    }


def _medians_ms(seconds: np.ndarray, names: tuple[str, ...]) -> dict[str, float]:
    """Milliseconds per phase that occurs, from (S, R, P) seconds: mean over ranks, then median over steps."""
    medians = np.median(seconds.mean(axis=1), axis=0) * 1e3
    return {name: float(medians[INDEX[name]]) for name in names if medians[INDEX[name]] > 0}


def rates(run: Run, times: StepTimes) -> dict[str, float | None]:
    """Tokens per second and per step, and MFU as a fraction: medians of the log over the measured steps. None of what
    the log does not hold: all of it, or MFU alone, where no peak was known."""
    kept = set(times.steps.tolist())
    rows = [row for row in run.log if row["step"] in kept and "tokens_per_s" in row and "step_s" in row]
    numbers = {
        "tokens_per_s": [row["tokens_per_s"] for row in rows],
        "tokens_per_step": [row["tokens_per_s"] * row["step_s"] for row in rows],
        "mfu": [row["mfu"] for row in rows if "mfu" in row],
    }
    return {name: float(np.median(values)) if values else None for name, values in numbers.items()}


def parts(figures: dict) -> dict[str, float]:
    """The step of a `summary` in milliseconds, cut so that the parts add up to it and each appears once.

    Exchanges without their waiting; "waiting": all waiting for other ranks; "other": what no phase covers.
    """
    waiting = figures["waiting_ms"]
    cut = {name: max(0.0, ms - waiting.get(name, 0.0)) for name, ms in figures["phases_ms"].items()}
    cut["waiting"] = cut.pop("wait", 0.0) + sum(waiting.values())
    cut["other"] = figures["other_ms"]
    return {name: ms for name, ms in cut.items() if ms > 0}
