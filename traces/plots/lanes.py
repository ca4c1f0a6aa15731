"""Lanes of a timeline: one row per rank, the nodes as bands, each span a coloured bar, its waiting part hatched."""

from dataclasses import dataclass
from math import ceil, log2

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection

from traces.plots.look import BAND, BUBBLE_STYLE, COLOUR, FAINT, WAITING_STYLE
from traces.plots.stage_lanes import label_places, lane_order
from traces.read.pipeline import bubbles_ns
from traces.record.phases import COMPUTE, INDEX, PHASES, STEP
from traces.verdict.summary import TimedRun

# Above this many spans a vector picture grows to megabytes: they are drawn as pixels inside it.
MOST_VECTOR_SPANS = 4000
# A narrower span of the picture's width shows no hatching, which takes long to draw.
NARROWEST_HATCHED = 0.003
# Lanes below this many inches touch, or the gaps between them would be all there is to see.
LOWEST_WITH_GAP = 0.06
# Between a lane and its node's name, for the rank's number.
NUMBER_POINTS = 20


@dataclass(frozen=True)
class Lanes:
    """All ranks' phases in some steps, n of them: (n,) arrays. Times are in ms from the first step's start.

    row: the rank's lane, the top one 0; phase: index into PHASES; wait: how much of the span, at its beginning, was
    waiting; bubble: how much of that, at its beginning, for other stages of its copy (traces/read/pipeline.py)
    """

    row: np.ndarray
    phase: np.ndarray
    start: np.ndarray
    wait: np.ndarray
    end: np.ndarray
    bubble: np.ndarray
    length: float

    @property
    def parts(self) -> set[str]:
        """What is drawn, for the legend."""
        found, has_bubble = {PHASES[index] for index in np.unique(self.phase)}, self.bubble.any()
        # Behind a bubble ranks come to a meeting microseconds apart: nobody sees that.
        seen = NARROWEST_HATCHED * self.length if has_bubble else 0.0
        found |= {"waiting"} if (self.wait - self.bubble > seen).any() else set()
        return found | ({"bubble"} if has_bubble else set())


def lanes_of(measured: TimedRun, first: int, count: int) -> Lanes:
    """`count` steps from index `first` of the measured steps."""
    ranks, times = measured.run.ranks, measured.times
    begin = int(times.start_ns[first].min())
    steps = times.steps[first : first + count]
    # By number, not by time: a rank that is early or late would show a sliver of the steps beside these. A validation
    # or a checkpoint has the number of the step before it; behind the last step shown it is none of its phases.
    chosen = [
        np.isin(one.records["step"], steps) & (one.records["phase"] != INDEX[STEP]) & (one.records["start"] < end)
        for one, end in zip(ranks, times.end_ns[first + count - 1], strict=True)
    ]
    records = np.concatenate([one.records[keep] for one, keep in zip(ranks, chosen, strict=True)])
    waits, bubbles = (
        np.concatenate([of_rank[keep] for of_rank, keep in zip(of_ranks, chosen, strict=True)])
        for of_ranks in (times.waits, bubbles_ns(measured.run, times.waits))
    )
    duration = records["end"] - records["start"]
    wait = np.where(records["phase"] == INDEX["wait"], duration, waits) * 1e-6
    rank = np.repeat(np.arange(len(ranks)), [np.count_nonzero(keep) for keep in chosen])
    row = np.argsort(lane_order(measured.run))[rank]
    start, end = ((records[edge] - begin) * 1e-6 for edge in ("start", "end"))
    length = (int(times.end_ns[first + count - 1].max()) - begin) * 1e-6
    return Lanes(row, records["phase"], start, wait, end, np.minimum(bubbles * 1e-6, wait), length)


def draw_lanes(axes: Axes, lanes: Lanes, ranks: int, lane_inches: float) -> None:
    """The axis of time is in milliseconds."""
    is_high = lane_inches >= LOWEST_WITH_GAP
    height = 0.78 if is_high else 1.0
    pixels = len(lanes.row) > MOST_VECTOR_SPANS
    arrived = lanes.start + lanes.wait

    def fill(chosen, left, right, **style):
        left, right, row = left[chosen], right[chosen], lanes.row[chosen]
        low, high = row - height / 2, row + height / 2
        x, y = np.stack([left, right, right, left], axis=1), np.stack([low, low, high, high], axis=1)
        axes.add_collection(PolyCollection(np.stack([x, y], axis=2), rasterized=pixels, **style), autolim=False)

    for name in PHASES:
        chosen = lanes.phase == INDEX[name]
        # The phases a strategy puts side by side get an edge, so that they are two in a grey print as well. Sums over
        # parts cut them into pieces so small that edges would be all there is to see.
        has_edge = name in COMPUTE and is_high and "tensor" not in lanes.parts
        edge = {"edgecolor": "white", "linewidth": 0.5} if has_edge else {"linewidth": 0}
        fill(chosen, arrived, lanes.end, facecolor=COLOUR[name], **edge)
    done = lanes.start + lanes.bubble
    for left, right, style in ((lanes.start, done, BUBBLE_STYLE), (done, arrived, WAITING_STYLE)):
        is_wide = right - left > NARROWEST_HATCHED * lanes.length
        fill((right > left) & ~is_wide, left, right, facecolor=COLOUR["waiting"], linewidth=0)
        fill(is_wide, left, right, **style)
    axes.set_xlim(0, lanes.length)
    axes.set_ylim(ranks - 0.4, -0.6)


def label_lanes(axes: Axes, measured: TimedRun, lane_inches: float, hosts: bool = False) -> None:
    """Left of the lanes, as `lanes_of` orders them: nodes and ranks, or where ranks share models their places there."""
    if measured.run.mesh is None:
        label_nodes(axes, measured, lane_inches, hosts)
    else:
        label_places(axes, measured.run, lane_inches)


def label_nodes(axes: Axes, measured: TimedRun, lane_inches: float, hosts: bool = False) -> None:
    """Rank numbers and node names left of the lanes, as many as their height has room for.

    Bands behind the lanes of every other node, reaching out to the names. hosts: name the hosts, too.
    """
    identities = [trace.identity for trace in measured.run.ranks]
    nodes = [identity["node"] for identity in identities]
    named = max(1, round(0.13 / lane_inches * len(set(nodes)) / len(nodes)))
    names, longest = {}, max(len(_node_text(identity, hosts)) for identity in identities)
    # As a part of the axes' width: a letter is 0.075 inches wide.
    inches = NUMBER_POINTS / 72 + 0.075 * longest
    margin = inches / (axes.figure.get_figwidth() - inches - 0.2)
    for order, node in enumerate(dict.fromkeys(nodes)):
        lanes = [rank for rank, other in enumerate(nodes) if other == node]
        for low, high in _runs_of(lanes):
            if order % 2 == 0:
                axes.axhspan(low - 0.5, high + 0.5, -margin, 1, color=BAND, zorder=0, linewidth=0, clip_on=False)
            if order % named == 0:
                names[(low + high) / 2] = _node_text(identities[low], hosts)
    every = 2 ** max(0, ceil(log2(0.14 / lane_inches)))
    numbers = range(0, len(nodes), every)
    axes.set_yticks(numbers, [f"{rank}" for rank in numbers], size=7, color=FAINT)
    axes.yaxis.remove_overlapping_locs = False  # a node of one rank has its name where the rank has its number
    axes.set_yticks(list(names), names.values(), minor=True, size=8)
    axes.tick_params(axis="y", length=0, pad=2)
    axes.tick_params(axis="y", which="minor", length=0, pad=NUMBER_POINTS)
    axes.spines["left"].set_visible(False)


def _node_text(identity: dict, hosts: bool) -> str:
    """ "node 3", with `hosts` "node 3 · cn07": the host's name without its domain."""
    host = f" · {identity['host'].split('.')[0][:16]}"
    return f"node {identity['node']}{host if hosts else ''}"


def _runs_of(lanes: list[int]) -> list[tuple[int, int]]:
    """First and last of each stretch of neighbouring numbers: [0, 1, 4] gives [(0, 1), (4, 4)]."""
    stretches = np.split(lanes, np.flatnonzero(np.diff(lanes) != 1) + 1)
    return [(int(stretch[0]), int(stretch[-1])) for stretch in stretches]


def lane_height(ranks: int, most: float) -> float:
    """Inches per rank: 0.2, less where all ranks together would be higher than `most`."""
    return min(0.2, most / ranks)
