"""Lanes of a timeline: one row per rank, the nodes as bands, each span a coloured bar, its waiting part hatched."""

from math import ceil, log2

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection

from traces.plots.look import BAND, COLOUR, FAINT, WAITING_STYLE
from traces.read.analysis import MeasuredRun
from traces.record.phases import COMPUTE, INDEX, PHASES, STEP

# Above this many spans a vector picture grows to megabytes: they are drawn as pixels inside it.
MOST_VECTOR_SPANS = 4000
# A narrower span of the picture's width shows no hatching, which takes long to draw.
NARROWEST_HATCHED = 0.003
# Lanes below this many inches touch, or the gaps between them would be all there is to see.
LOWEST_WITH_GAP = 0.06


def draw_lanes(axes: Axes, measured: MeasuredRun, first: int, count: int, lane_inches: float) -> set[str]:
    """Draw `count` steps from index `first` of the measured steps, all ranks, in milliseconds from their start.

    Returns the parts drawn (for the legend). Rank 0 is on top.
    """
    times = measured.times
    begin = int(times.start_ns[first].min())
    length = (int(times.end_ns[first + count - 1].max()) - begin) * 1e-6
    row, phase, start, wait, end = _spans(measured, times.steps[first : first + count], begin)
    is_high = lane_inches >= LOWEST_WITH_GAP
    height = 0.78 if is_high else 1.0
    pixels = len(row) > MOST_VECTOR_SPANS

    def fill(chosen, left, right, **style):
        corners = _rectangles(left[chosen], right[chosen], row[chosen], height)
        axes.add_collection(PolyCollection(corners, rasterized=pixels, **style), autolim=False)

    for name in PHASES:
        # The phases a strategy puts side by side get an edge, so that they are two in a grey print as well.
        edge = {"edgecolor": "white", "linewidth": 0.5} if name in COMPUTE and is_high else {"linewidth": 0}
        fill(phase == INDEX[name], start + wait, end, facecolor=COLOUR[name], **edge)
    is_wide = wait > NARROWEST_HATCHED * length
    fill((wait > 0) & ~is_wide, start, start + wait, facecolor=COLOUR["waiting"], linewidth=0)
    fill(is_wide, start, start + wait, **WAITING_STYLE)
    axes.set_xlim(0, length)
    axes.set_ylim(len(measured.run.ranks) - 0.4, -0.6)
    return {PHASES[index] for index in np.unique(phase)} | ({"waiting"} if wait.any() else set())


def _spans(measured: MeasuredRun, steps: np.ndarray, begin: int) -> tuple[np.ndarray, ...]:
    """All ranks' phases of these steps: rank, phase, start, waiting and end, the latter in ms after `begin`."""
    ranks = measured.run.ranks
    # By number, not by time: a rank that is early or late would show a sliver of the steps beside these.
    chosen = [np.isin(one.records["step"], steps) & (one.records["phase"] != INDEX[STEP]) for one in ranks]
    records = np.concatenate([one.records[keep] for one, keep in zip(ranks, chosen, strict=True)])
    waits = np.concatenate([waits[keep] for waits, keep in zip(measured.times.waits, chosen, strict=True)])
    duration = records["end"] - records["start"]
    wait = np.where(records["phase"] == INDEX["wait"], duration, waits) * 1e-6
    rank = np.repeat(np.arange(len(ranks)), [np.count_nonzero(keep) for keep in chosen])
    return rank, records["phase"], (records["start"] - begin) * 1e-6, wait, (records["end"] - begin) * 1e-6


def _rectangles(left: np.ndarray, right: np.ndarray, row: np.ndarray, height: float) -> np.ndarray:
    """(n, 4, 2) corners of n bars, each centred on its row."""
    low, high = row - height / 2, row + height / 2
    return np.stack(
        [np.stack(corner, axis=1) for corner in ((left, low), (right, low), (right, high), (left, high))], 1
    )


def node_text(identity: dict, hosts: bool) -> str:
    """ "node 3", with `hosts` "node 3 · cn07": the host's name without its domain."""
    return f"node {identity['node']}" + (f" · {identity['host'].split('.')[0][:16]}" if hosts else "")


def label_nodes(axes: Axes, measured: MeasuredRun, lane_inches: float, margin: float, hosts: bool = True) -> None:
    """Bands behind the lanes of every other node, reaching out left by `margin` (a fraction of the axes' width).

    Node names and rank numbers outside left, as many as the lanes' height has room for.
    """
    identities = [trace.identity for trace in measured.run.ranks]
    nodes = [identity["node"] for identity in identities]
    named = max(1, round(0.13 / lane_inches * len(set(nodes)) / len(nodes)))
    for order, node in enumerate(dict.fromkeys(nodes)):
        lanes = [rank for rank, other in enumerate(nodes) if other == node]
        for low, high in _runs_of(lanes):
            if order % 2 == 0:
                axes.axhspan(low - 0.5, high + 0.5, -margin, 1, color=BAND, zorder=0, linewidth=0, clip_on=False)
            if order % named:
                continue
            axes.annotate(
                node_text(identities[low], hosts), (0, (low + high) / 2), (-18, 0), ha="right", va="center", size=8,
                xycoords=("axes fraction", "data"), textcoords="offset points", annotation_clip=False,
            )  # fmt: skip
    every = 2 ** max(0, ceil(log2(0.14 / lane_inches)))
    axes.set_yticks(range(0, len(nodes), every))
    axes.set_yticklabels([f"{rank}" for rank in range(0, len(nodes), every)], size=7, color=FAINT)
    axes.tick_params(axis="y", length=0, pad=2)
    axes.spines["left"].set_visible(False)


def _runs_of(lanes: list[int]) -> list[tuple[int, int]]:
    """First and last of each stretch of neighbouring numbers: [0, 1, 4] gives [(0, 1), (4, 4)]."""
    stretches = np.split(lanes, np.flatnonzero(np.diff(lanes) != 1) + 1)
    return [(int(stretch[0]), int(stretch[-1])) for stretch in stretches]


def lane_height(ranks: int, most: float) -> float:
    """Inches per rank: 0.2, less where all ranks together would be higher than `most`."""
    return min(0.2, most / ranks)
