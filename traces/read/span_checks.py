"""Check that records are as a tracer writes them, so that later code can rely on it.

Times have no checksum, so a damaged time may look like another valid one. But times must be in range, and a rank's
spans must follow each other. All functions raise ValueError with the problem in half a line.
"""

import numpy as np

from traces.read.schemas import LATEST_NS
from traces.record.phases import INDEX, STEP

MOST_COUNTED_PER_NS = 10_000  # 10 TB/s through a node's ports


def check_records(records: np.ndarray, ranks: int) -> None:
    """Check an array of files.RECORD: sorted by end, phases one after the other, steps enclosing phases."""
    step = records["step"]
    start = records["start"]
    end = records["end"]
    root = records["root"]
    _demand((start >= 0) & (start <= end) & (end <= LATEST_NS), "a span ends before it begins, or a time is impossible")
    known = (step >= 0) & (records["bytes"] >= 0) & (root >= -1) & (root < ranks)
    _demand(known, "a step, root or size is impossible")
    _demand(np.diff(step) >= 0, "a step comes after a later one")
    _demand(np.diff(end) >= 0, "a span was written before an earlier one")
    is_step = records["phase"] == INDEX[STEP]
    phases = records[~is_step]
    steps = records[is_step]
    _demand(phases["start"][1:] >= phases["end"][:-1], "two phases overlap")
    _demand(steps["start"][1:] >= steps["end"][:-1], "two steps overlap")
    _demand(np.diff(steps["step"]) > 0, "a step appears twice")
    _demand(steps["end"] > steps["start"], "a step took no time")
    _check_edges(phases, steps, np.flatnonzero(is_step).searchsorted(np.flatnonzero(~is_step)))


def _check_edges(phases: np.ndarray, steps: np.ndarray, following: np.ndarray) -> None:
    """Check that no phase crosses a step's edge. following: (phases,) index of the first step written after each."""
    has_one = following < len(steps)
    one = phases[has_one]
    own = steps[following[has_one]]
    begins_inside = np.where(one["step"] == own["step"], one["start"] >= own["start"], one["end"] <= own["start"])
    _demand(begins_inside, "a phase overlaps the edge of its step")
    has_last = following > 0
    last = steps[following[has_last] - 1]
    _demand(phases["start"][has_last] >= last["end"], "a phase overlaps the step before it")


def check_samples(samples: np.ndarray) -> None:
    """Check an array of files.COUNTERS: sorted by time, no faster than a port can carry. A counter may restart."""
    times = samples["time"]
    _demand((times >= 0) & (times <= LATEST_NS), "a time is impossible")
    _demand(np.diff(times) >= 0, "a sample comes before an earlier one")
    for name in samples.dtype.names[1:]:
        _demand(samples[name] >= 0, "a counter is negative")
        growth = np.diff(samples[name]) // MOST_COUNTED_PER_NS
        _demand(growth <= np.diff(times), "a counter grows faster than any port can carry")


def _demand(holds: np.ndarray, otherwise: str) -> None:
    if not holds.all():
        raise ValueError(otherwise)
