"""Measure a run's steps: seconds by step, rank and phase, and whether they add up.

Only steps after the warm-up that are complete on every rank count.
"""

from dataclasses import dataclass
from functools import reduce

import numpy as np

from traces.read.runs import Run
from traces.read.waits import find_waits
from traces.record.files import RunError
from traces.record.phases import INDEX, NAMES, PHASES, STEP

WARM_UP_STEPS = 2
# With fewer steps than this after the warm-up, the warm-up steps are kept.
FEWEST_STEPS = 3
TOLERANCE = 0.01  # relative difference of two sums that should be equal


@dataclass(frozen=True)
class StepTimes:
    """The times of a run's steps. S steps, R ranks, P = len(NAMES) phases in the order of NAMES.

    steps: (S,) int64, step numbers, ascending
    dropped: number of warm-up steps left out before them
    start_ns, end_ns: (S, R) int64, each rank's envelope of the step on rank 0's clock
    seconds: (S, R, P) float64, of the phases inside the envelope; the last phase is the envelope itself
    waiting: (S, R, P) float64, the part of `seconds` spent waiting for another rank (exchange phases only)
    waits: per rank an int64 array as long as its records, nanoseconds waited
    cells: per rank an int64 array as long as its records, each record's index in a flat (S, P) table; S * P outside the
        steps' envelopes
    exchange_period: the run's nodes exchange once in so many steps
    """

    steps: np.ndarray
    dropped: int
    start_ns: np.ndarray
    end_ns: np.ndarray
    seconds: np.ndarray
    waiting: np.ndarray
    waits: list[np.ndarray]
    cells: list[np.ndarray]
    exchange_period: int = 1

    def average(self, values: np.ndarray) -> np.ndarray:
        """Return the median over the steps, axis 0; the mean if the median step exchanges nothing (exchange_period)."""
        return np.median(values, axis=0) if self.exchange_period == 1 else np.mean(values, axis=0)

    @property
    def step_seconds(self) -> np.ndarray:
        """(S,) float64: the duration of each step, the mean of the ranks."""
        return self.seconds[:, :, INDEX[STEP]].mean(axis=1)

    def phase(self, *names: str) -> np.ndarray:
        """Return (S, R) float64: seconds in these phases together."""
        return self.seconds[:, :, [INDEX[name] for name in names]].sum(axis=2)

    def waiting_in(self, *names: str) -> np.ndarray:
        """Return (S, R) float64: seconds of these phases spent waiting for another rank."""
        return self.waiting[:, :, [INDEX[name] for name in names]].sum(axis=2)

    def representative(self) -> int:
        """Return the index into `steps` of the step whose duration is nearest to the median."""
        return int(np.argmin(np.abs(self.step_seconds - np.median(self.step_seconds))))


def measure(run: Run, warm_up: int = WARM_UP_STEPS) -> StepTimes:
    """Measure a run's steps. Leave out the first `warm_up` traced steps if enough others remain."""
    steps, start, end = _complete_steps(run)
    dropped = warm_up if len(steps) >= warm_up + FEWEST_STEPS else 0
    steps = steps[dropped:]
    start = start[dropped:]
    end = end[dropped:]
    cells = [_cells(trace.records, steps, start[:, rank], end[:, rank]) for rank, trace in enumerate(run.ranks)]
    waits = find_waits(run)
    lengths = [trace.records["end"] - trace.records["start"] for trace in run.ranks]
    seconds = sum_by_cell(cells, lengths, len(steps)) * 1e-9
    waiting = sum_by_cell(cells, waits, len(steps)) * 1e-9
    period = run.config.get("exchange_period", 1)
    return StepTimes(steps, dropped, start, end, seconds, waiting, waits, cells, period)


def _complete_steps(run: Run) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (S,) numbers of the steps whose envelope every rank wrote, and its start and end in ns, (S, R) each."""
    envelopes = [trace.records[trace.records["phase"] == INDEX[STEP]] for trace in run.ranks]
    steps = reduce(np.intersect1d, [one["step"] for one in envelopes]).astype(np.int64)
    if not len(steps):
        raise RunError(
            f"{run.path / 'traces'}: no step is complete on all {len(run.ranks)} ranks; train for a few steps more, "
            f"and check that --trace FROM:TO lies inside --steps"
        )
    complete = np.stack([one[np.searchsorted(one["step"], steps)] for one in envelopes], axis=1)
    return steps, complete["start"], complete["end"]


def _cells(records: np.ndarray, steps: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return one rank's StepTimes.cells. start, end: (S,) its envelopes of the steps."""
    index = np.searchsorted(steps, records["step"]).clip(max=len(steps) - 1)
    inside = (records["step"] == steps[index]) & (records["start"] >= start[index]) & (records["end"] <= end[index])
    return np.where(inside, index * len(NAMES) + records["phase"], len(steps) * len(NAMES))


def sum_by_cell(cells: list[np.ndarray], amounts: list[np.ndarray], steps: int) -> np.ndarray:
    """Sum the amounts of the ranks' records into an (S, ranks, P) table. cells: of these records, as in StepTimes."""
    size = steps * len(NAMES)
    sums = [np.bincount(cell, amount, size + 1)[:size] for cell, amount in zip(cells, amounts, strict=True)]
    return np.stack([one.reshape(steps, len(NAMES)) for one in sums], axis=1)


def rates(run: Run, times: StepTimes) -> dict[str, float | bool | None]:
    """Return tokens per second and per step, and MFU as a fraction: averages of the log over the measured steps.

    None: the log lacks the number (only MFU, if no peak was known). "peak_underestimated": a step exceeded the peak, so
    the rate of the fastest step counts as 100% MFU.
    """
    kept = set(times.steps.tolist())
    rows = [row for row in run.log if row["step"] in kept and "tokens_per_s" in row and "step_s" in row]
    numbers = {"tokens_per_s": None, "tokens_per_step": None}
    if rows:
        seconds = np.array([row["step_s"] for row in rows])
        tokens = float(np.median([row["tokens_per_s"] * row["step_s"] for row in rows]))
        numbers = {"tokens_per_s": tokens / float(times.average(seconds)), "tokens_per_step": tokens}
    return numbers | _utilization(run, times, [row for row in rows if row.get("mfu")])


def _utilization(run: Run, times: StepTimes, rows: list[dict]) -> dict[str, float | bool | None]:
    """Return the MFU of the average of the rows that have one, and whether its peak was underestimated.

    Training raises the peak to the rate of each faster step, so that the log's last row has the largest peak.
    """
    if not rows:
        return {"mfu": None, "peak_underestimated": False}
    mfus = np.array([row["mfu"] for row in rows])
    is_underestimated = any("peak_underestimated" in row for row in rows)
    if is_underestimated:
        rates = np.array([row["tokens_per_s"] for row in rows])
        last = next(row for row in reversed(run.log) if row.get("mfu") and "tokens_per_s" in row)
        tokens_per_s_at_peak = max(last["tokens_per_s"] / last["mfu"], rates.max())
        mfus = rates / tokens_per_s_at_peak
    return {"mfu": 1 / float(times.average(1 / mfus)), "peak_underestimated": is_underestimated}


def check_sums(run: Run, times: StepTimes, tolerance: float = TOLERANCE) -> list[str]:
    """Return a sentence for each sum that does not add up over the measured steps.

    A rank's phases are compared with its steps, and rank 0's steps with log.jsonl.
    """
    steps = times.phase(STEP).sum(axis=0)
    phases = times.phase(*PHASES).sum(axis=0)
    difference = np.abs(steps - phases) / steps
    found = _check_log(run, times, tolerance)
    if count := int((difference > tolerance).sum()):
        worst = int(np.argmax(difference))
        more = f", {count - 1} other ranks likewise" if count > 1 else ""
        sums = f"phases sum to {phases[worst]:.3f} s of {steps[worst]:.3f} s in its steps"
        found.insert(0, f"rank {run.rank_numbers[worst]}: {sums}{more}")
    return found


def _check_log(run: Run, times: StepTimes, tolerance: float) -> list[str]:
    logged = {row["step"]: row["step_s"] for row in run.log if "step_s" in row}
    both = [index for index, step in enumerate(times.steps.tolist()) if step in logged]
    if not both or run.rank_numbers[0] != 0:
        return []
    traced_s = times.seconds[both, 0, INDEX[STEP]].sum()
    logged_s = sum(logged[int(times.steps[index])] for index in both)
    if abs(traced_s - logged_s) <= tolerance * logged_s:
        return []
    return [f"log.jsonl: {len(both)} steps took {logged_s:.3f} s, rank 0's trace says {traced_s:.3f} s"]
