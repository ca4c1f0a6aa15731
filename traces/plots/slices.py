"""Plot: the slices of the vector in one step, each a lane under its root: when every rank's part of it was under way.

Do all roots collect at once, or one after another? For runs whose ranks noted each call (traces/record/calls.py).
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
from traces.verdict.headlines import title_lines
from traces.verdict.summary import TimedRun

LANE_INCHES, MOST_INCHES = 0.3, 9.0
LANE_PART = 0.84  # of a lane's height: the rest divides it from the next one
MOMENTS = 2000  # at which it is counted how many slices are under way


@dataclass(frozen=True)
class Calls:
    """All ranks' calls that began in one step, n of them: (n,) arrays; times in ms from the step's beginning.

    rank, root: index in run.ranks; kind: index into PHASES; size: bytes. end_ms: of the step.
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
        """What they are, in the order of a step."""
        return [name for name in EXCHANGE if INDEX[name] in self.kind]


def calls_of(measured: TimedRun) -> Calls | None:
    """Those of the representative step; None where none were noted."""
    times, numbers = measured.times, measured.run.rank_numbers
    index = times.representative()
    chosen = [
        (one.calls["step"] == times.steps[index]) & np.isin(one.calls["root"], numbers) for one in measured.run.ranks
    ]
    ranks = [one.calls[keep] for one, keep in zip(measured.run.ranks, chosen, strict=True)]
    found, begin = np.concatenate(ranks), int(times.start_ns[index].min())
    if not len(found):
        return None
    rank = np.repeat(np.arange(len(ranks)), [len(calls) for calls in ranks])
    start, end = ((found[edge] - begin) * 1e-6 for edge in ("start", "end"))
    end_ms = (int(times.end_ns[index].max()) - begin) * 1e-6
    return Calls(rank, np.searchsorted(numbers, found["root"]), found["phase"], start, end, found["bytes"], end_ms)


def draw(measured: list[TimedRun]) -> Figure | None:
    """Runs below each other with one axis of time, as far as they have calls; None if no run has."""
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
    lines = "a lane: the slice whose root that rank is; in it a line a rank, rank 0's on top, dark the root's"
    notes = [*look.facts([one for one, _ in shown]), lines]
    with look.page(9, inches, *title, look.legend_handles(kinds), notes) as figure:
        rows = figure.subplots(len(shown), 1, sharex=True, squeeze=False, height_ratios=counts)[:, 0]
        for axes, (one, calls) in zip(rows, shown, strict=True):
            _draw_run(axes, one, calls, lane, names_it=len(shown) > 1)
        rows[0].set_xlim(0, max(max(calls.end.max(), calls.end_ms) for _, calls in shown))
        rows[-1].set_xlabel("milliseconds from the step's beginning", labelpad=2)
    return figure


def under_way(calls: Calls) -> float:
    """Slices that some rank has under way, the mean over the moments when one is; reduces and broadcasts apart."""
    moments = np.linspace(calls.start.min(), calls.end.max(), MOMENTS)
    active = np.zeros(MOMENTS)
    for root, kind in {*zip(calls.root.tolist(), calls.kind.tolist(), strict=True)}:
        own = (calls.root == root) & (calls.kind == kind)
        begun = np.searchsorted(np.sort(calls.start[own]), moments, "right")
        ended = np.searchsorted(np.sort(calls.end[own]), moments, "right")
        active += begun > ended
    return float(active[active > 0].mean())


def slice_bytes(calls: Calls, root: int) -> int:
    """What the root itself has handed to its calls of the first kind: the slice, as it travels."""
    own = (calls.root == root) & (calls.rank == root) & (calls.kind == INDEX[calls.kinds[0]])
    return int(calls.size[own].sum())


def _draw_run(axes: Axes, measured: TimedRun, calls: Calls, lane: float, names_it: bool) -> None:
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


def _draw_lines(axes: Axes, calls: Calls, chosen: np.ndarray, ranks: int, colour: str) -> None:
    """One for each call: inside its root's lane, at its rank's height."""
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


def _mark(axes: Axes, measured: TimedRun, calls: Calls) -> None:
    """Where the slowest rank's backward ends, and the step."""
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
