"""Plot of the calls of one step, in a lane for each root. Do all roots collect at once, or one after another?

For runs whose ranks recorded each call (rank-*.calls). Each root's calls exchange one slice of the gradients.
"""

from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from traces.plots import look
from traces.plots.lanes import MOST_VECTOR_SPANS, add_bars, label_nodes
from traces.record.phases import EXCHANGE, INDEX
from traces.units import bytes_text
from traces.verdict.summary import TimedRun
from traces.verdict.titles import title_lines

LANE_INCHES = 0.3
MOST_INCHES = 9.0
LANE_PART = 0.84  # of a lane's height; the rest separates it from the next one
MOMENTS = 2000  # points in time at which active slices are counted


@dataclass(frozen=True)
class StepCalls:
    """All ranks' calls that began in one step: (n,) arrays, times in ms from the step's beginning.

    rank, root: index in run.ranks. kind: index into PHASES. size: bytes. end_ms: the end of the step.
    """

    rank: np.ndarray
    root: np.ndarray
    kind: np.ndarray
    start: np.ndarray
    end: np.ndarray
    size: np.ndarray
    end_ms: float

    @property
    def kinds(self) -> list[str]:
        """The phases of the calls, in the order of a step."""
        return [name for name in EXCHANGE if INDEX[name] in self.kind]


def calls_of(measured: TimedRun) -> StepCalls | None:
    """Return the calls of the representative step; None if none were recorded."""
    times = measured.times
    numbers = measured.run.rank_numbers
    index = times.representative()
    chosen = [
        (one.calls["step"] == times.steps[index]) & np.isin(one.calls["root"], numbers) for one in measured.run.ranks
    ]
    ranks = [one.calls[keep] for one, keep in zip(measured.run.ranks, chosen, strict=True)]
    found = np.concatenate(ranks)
    begin = int(times.start_ns[index].min())
    if not len(found):
        return None
    rank = np.repeat(np.arange(len(ranks)), [len(calls) for calls in ranks])
    start = (found["start"] - begin) * 1e-6
    end = (found["end"] - begin) * 1e-6
    end_ms = (int(times.end_ns[index].max()) - begin) * 1e-6
    return StepCalls(rank, np.searchsorted(numbers, found["root"]), found["phase"], start, end, found["bytes"], end_ms)


def draw(measured: TimedRun) -> Figure | None:
    """Draw the calls of the representative step. None if none were recorded."""
    calls = calls_of(measured)
    if calls is None:
        return None
    ranks = len(measured.run.ranks)
    lane = min(LANE_INCHES, MOST_INCHES / ranks)
    facts = f"{under_way(calls):.1f} of {len(np.unique(calls.root))} slices under way at a time"
    title = title_lines(measured.diagnosis, measured.label, "slices", facts)
    lines = "a lane: the slice of that root; in it a line for each rank, rank 0 on top, the root's line dark"
    notes = [*look.facts([measured]), lines]
    with look.page(9, lane * ranks + 0.7, *title, look.legend_handles(calls.kinds), notes) as figure:
        axes = figure.subplots()
        for name in calls.kinds:
            for is_root, light in ((False, 1.0), (True, 0.45)):
                chosen = (calls.kind == INDEX[name]) & ((calls.root == calls.rank) == is_root)
                _draw_lines(axes, calls, chosen, ranks, light * np.array(to_rgb(look.COLOUR[name])))
        axes.set_xlim(0, max(calls.end.max(), calls.end_ms))
        axes.set_ylim(ranks - 0.5, -0.5)
        axes.set_xlabel("milliseconds from the step's beginning", labelpad=2)
        label_nodes(axes, measured, lane)
        _mark(axes, measured, calls)
        for root in np.unique(calls.root).tolist():
            size = bytes_text(slice_bytes(calls, root))
            beside = {"xycoords": ("axes fraction", "data"), "va": "center"}
            look.note(axes, size, (1, root), (3, 0), size=7, color=look.FAINT, **beside)
    return figure


def under_way(calls: StepCalls) -> float:
    """Return the mean number of slices in progress at once, while there are any; reduce and bcast count separately."""
    moments = np.linspace(calls.start.min(), calls.end.max(), MOMENTS)
    active = np.zeros(MOMENTS)
    for root, kind in {*zip(calls.root.tolist(), calls.kind.tolist(), strict=True)}:
        own = (calls.root == root) & (calls.kind == kind)
        begun = np.searchsorted(np.sort(calls.start[own]), moments, "right")
        ended = np.searchsorted(np.sort(calls.end[own]), moments, "right")
        active += begun > ended
    return float(active[active > 0].mean())


def slice_bytes(calls: StepCalls, root: int) -> int:
    """Return the bytes of a root's slice: the bytes that the root passed to its calls of the first kind."""
    own = (calls.root == root) & (calls.rank == root) & (calls.kind == INDEX[calls.kinds[0]])
    return int(calls.size[own].sum())


def _draw_lines(axes: Axes, calls: StepCalls, chosen: np.ndarray, ranks: int, colour) -> None:
    """Draw a line for each call, in its root's lane at its rank's height."""
    height = LANE_PART / ranks
    low = calls.root[chosen] - LANE_PART / 2 + height * calls.rank[chosen]
    style = {"facecolor": colour, "linewidth": 0, "rasterized": len(calls.rank) > MOST_VECTOR_SPANS}
    add_bars(axes, calls.start[chosen], calls.end[chosen], low, low + height, **style)


def _mark(axes: Axes, measured: TimedRun, calls: StepCalls) -> None:
    """Mark the end of the slowest rank's backward, and of the step."""
    times = measured.times
    index = times.representative()
    ends = [
        one.records["end"][(one.records["step"] == times.steps[index]) & (one.records["phase"] == INDEX["backward"])]
        for one in measured.run.ranks
    ]
    found = [int(end.max()) for end in ends if len(end)]
    marks = {"step ends": calls.end_ms}
    if found:
        marks["backward ends"] = (max(found) - int(times.start_ns[index].min())) * 1e-6
    for text, moment in marks.items():
        axes.axvline(moment, color=look.INK, linewidth=0.8, linestyle=(0, (3, 2)))
        above = {"xycoords": ("data", "axes fraction"), "ha": "center"}
        look.note(axes, text, (moment, 1), (0, 2), size=7.5, color=look.FAINT, **above)
