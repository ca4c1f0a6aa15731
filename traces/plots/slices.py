"""Plot of the calls of one step, in a lane for each root. Do all roots collect at once, or one after another?

For runs whose ranks recorded each call (rank-*.calls). A root's calls are of one slice of the gradients.
"""

from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from traces.plots import look
from traces.plots.lanes import MOST_VECTOR_SPANS, label_nodes
from traces.record.phases import EXCHANGE, INDEX
from traces.units import bytes_text
from traces.verdict.summary import TimedRun
from traces.verdict.titles import title_lines

LANE_INCHES = 0.3
MOST_INCHES = 9.0
LANE_PART = 0.84  # of a lane's height; the rest separates it from the next one
MOMENTS = 2000  # at which slices under way are counted


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
    """The calls of the representative step; None if none were recorded."""
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
    start, end = ((found[edge] - begin) * 1e-6 for edge in ("start", "end"))
    end_ms = (int(times.end_ns[index].max()) - begin) * 1e-6
    return StepCalls(rank, np.searchsorted(numbers, found["root"]), found["phase"], start, end, found["bytes"], end_ms)


def draw(measured: list[TimedRun]) -> Figure | None:
    """Draw the runs that have calls below each other, on one time axis. None if no run has calls."""
    shown = [(one, calls) for one in measured if (calls := calls_of(one)) is not None]
    if not shown:
        return None
    counts = [len(one.run.ranks) for one, _ in shown]
    lane = min(LANE_INCHES, MOST_INCHES / sum(counts))
    facts = [f"{under_way(calls):.1f} of {len(np.unique(calls.root))} slices under way at a time" for _, calls in shown]
    title = title_lines(shown[0][0].diagnosis, shown[0][0].label, "slices", facts[0])
    if len(shown) > 1:
        title = "; ".join(f"{one.label}: {text}" for (one, _), text in zip(shown, facts, strict=True)), ""
    kinds = {name for _, calls in shown for name in calls.kinds}
    inches = lane * sum(counts) + (0.45 if len(shown) > 1 else 0.25) * len(shown) + 0.45
    lines = "a lane: the slice of that root; in it a line for each rank, rank 0 on top, the root's line dark"
    notes = [*look.facts([one for one, _ in shown]), lines]
    with look.page(9, inches, *title, look.legend_handles(kinds), notes) as figure:
        rows = figure.subplots(len(shown), 1, sharex=True, squeeze=False, height_ratios=counts)[:, 0]
        for axes, (one, calls) in zip(rows, shown, strict=True):
            _draw_run(axes, one, calls, lane, names_it=len(shown) > 1)
        rows[0].set_xlim(0, max(max(calls.end.max(), calls.end_ms) for _, calls in shown))
        rows[-1].set_xlabel("milliseconds from the step's beginning", labelpad=2)
    return figure


def under_way(calls: StepCalls) -> float:
    """The mean number of slices under way on some rank, while there are any. Reduces and broadcasts count apart."""
    moments = np.linspace(calls.start.min(), calls.end.max(), MOMENTS)
    active = np.zeros(MOMENTS)
    for root, kind in {*zip(calls.root.tolist(), calls.kind.tolist(), strict=True)}:
        own = (calls.root == root) & (calls.kind == kind)
        begun = np.searchsorted(np.sort(calls.start[own]), moments, "right")
        ended = np.searchsorted(np.sort(calls.end[own]), moments, "right")
        active += begun > ended
    return float(active[active > 0].mean())


def slice_bytes(calls: StepCalls, root: int) -> int:
    """Bytes of a root's slice: those that the root handed to its calls of the first kind."""
    own = (calls.root == root) & (calls.rank == root) & (calls.kind == INDEX[calls.kinds[0]])
    return int(calls.size[own].sum())


def _draw_run(axes: Axes, measured: TimedRun, calls: StepCalls, lane: float, names_it: bool) -> None:
    ranks = len(measured.run.ranks)
    for name in calls.kinds:
        for is_root in (False, True):
            chosen = (calls.kind == INDEX[name]) & ((calls.root == calls.rank) == is_root)
            _draw_lines(axes, calls, chosen, ranks, _colour(name, is_root))
    axes.set_ylim(ranks - 0.5, -0.5)
    label_nodes(axes, measured, lane)
    _mark(axes, measured, calls)
    for root in np.unique(calls.root).tolist():
        text = bytes_text(slice_bytes(calls, root))
        axes.annotate(
            text, (1, root), (3, 0), xycoords=("axes fraction", "data"), textcoords="offset points", va="center",
            size=7, color=look.FAINT, annotation_clip=False,
        )  # fmt: skip
    if names_it:
        axes.set_title(measured.label, loc="left", size=9, pad=13)


def _draw_lines(axes: Axes, calls: StepCalls, chosen: np.ndarray, ranks: int, colour: str) -> None:
    """Draw a line for each call, in its root's lane at its rank's height."""
    height = LANE_PART / ranks
    left, right = calls.start[chosen], calls.end[chosen]
    low = calls.root[chosen] - LANE_PART / 2 + height * calls.rank[chosen]
    x, y = np.stack([left, right, right, left], axis=1), np.stack([low, low, low + height, low + height], axis=1)
    pixels = len(calls.rank) > MOST_VECTOR_SPANS
    lines = PolyCollection(np.stack([x, y], axis=2), facecolor=colour, linewidth=0, rasterized=pixels)
    axes.add_collection(lines, autolim=False)


def _colour(name: str, is_root: bool) -> str:
    colour = look.COLOUR[name]
    if not is_root:
        return colour
    return "#" + "".join(f"{int(colour[at : at + 2], 16) * 45 // 100:02x}" for at in (1, 3, 5))


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
        axes.annotate(
            text, (moment, 1), (0, 2), xycoords=("data", "axes fraction"), textcoords="offset points", size=7.5,
            ha="center", color=look.FAINT, annotation_clip=False,
        )  # fmt: skip
