"""The lanes of a timeline: a row for each rank, nodes as bands, spans as coloured bars with hatched waiting.

Lanes of ranks that share models are sorted by replica, stage and shard, with the numbers of the microbatches.
"""

from dataclasses import dataclass
from math import ceil, log2

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection

from traces.plots.look import BAND, BUBBLE_STYLE, COLOUR, FAINT, INK, WAITING_STYLE
from traces.read.pipeline_times import bubbles_ns, passes_of
from traces.read.runs import Run
from traces.record.phases import COMPUTE, INDEX, PHASES, STEP
from traces.verdict.summary import TimedRun

# More spans than this are drawn as pixels: as vectors they would take megabytes.
MOST_VECTOR_SPANS = 4000
# Spans narrower than this fraction of the picture have no hatching, which is slow to draw.
NARROWEST_HATCHED = 0.003
# Lanes lower than this, in inches, have no gaps between them.
LOWEST_WITH_GAP = 0.06
NUMBER_POINTS = 20  # space for a rank's number between its lane and the node's name
LANE_INCHES = 0.32  # high enough for microbatch numbers, if lanes are few
LETTER_INCHES = 0.068
MOST_NUMBERS = 1000


@dataclass(frozen=True)
class Lanes:
    """All ranks' phases in some steps: (n,) arrays. Times are in ms from the first step's start.

    row: the rank's lane, 0 at the top. phase: index into PHASES. wait: the waiting at the beginning of the span.
    bubble: the first part of this waiting, for other stages of the replica (traces/read/pipeline_times.py).
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
        """The parts that are drawn, for the legend."""
        found = {PHASES[index] for index in np.unique(self.phase)}
        has_bubble = self.bubble.any()
        # After a bubble, ranks enter a collective microseconds apart: such waits are too short to see.
        seen = NARROWEST_HATCHED * self.length if has_bubble else 0.0
        found |= {"waiting"} if (self.wait - self.bubble > seen).any() else set()
        return found | ({"bubble"} if has_bubble else set())


def lanes_of(measured: TimedRun, first: int, count: int) -> Lanes:
    """Collect `count` steps from index `first` of the measured steps."""
    ranks = measured.run.ranks
    times = measured.times
    begin = int(times.start_ns[first].min())
    steps = times.steps[first : first + count]
    # Select by step number, not by time: early or late ranks would show slivers of neighbouring steps. A validation or
    # a checkpoint has the number of the step before it, and is left out after the last step.
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
    start = (records["start"] - begin) * 1e-6
    end = (records["end"] - begin) * 1e-6
    length = (int(times.end_ns[first + count - 1].max()) - begin) * 1e-6
    return Lanes(row, records["phase"], start, wait, end, np.minimum(bubbles * 1e-6, wait), length)


def draw_lanes(axes: Axes, lanes: Lanes, ranks: int, lane_inches: float) -> None:
    """Draw the lanes, with time in milliseconds."""
    is_high = lane_inches >= LOWEST_WITH_GAP
    height = 0.78 if is_high else 1.0
    pixels = len(lanes.row) > MOST_VECTOR_SPANS
    arrived = lanes.start + lanes.wait

    def fill(chosen, left, right, **style):
        low = lanes.row[chosen] - height / 2
        x = np.stack([left, right, right, left], axis=1)[chosen]
        y = np.stack([low, low, low + height, low + height], axis=1)
        axes.add_collection(PolyCollection(np.stack([x, y], axis=2), rasterized=pixels, **style), autolim=False)

    for name in PHASES:
        chosen = lanes.phase == INDEX[name]
        # Neighbouring compute phases get an edge, which separates them in greyscale. Tensor-parallel sums cut them
        # into pieces so small that only edges would be visible.
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
    """Label the lanes of `lanes_of` with nodes and ranks, or with replica, stage and shard if ranks share models."""
    if measured.run.mesh is None:
        _label_nodes(axes, measured, lane_inches, hosts)
    else:
        _label_places(axes, measured.run, lane_inches)


def _label_nodes(axes: Axes, measured: TimedRun, lane_inches: float, hosts: bool) -> None:
    """Write rank numbers and node names left of the lanes, as many as fit; draw bands behind every other node's lanes.

    hosts: also name the hosts.
    """
    identities = [trace.identity for trace in measured.run.ranks]
    nodes = [identity["node"] for identity in identities]
    named = max(1, round(0.13 / lane_inches * len(set(nodes)) / len(nodes)))
    names = {}
    longest = max(len(_node_text(identity, hosts)) for identity in identities)
    # As a fraction of the axes' width; a letter is 0.075 inches wide.
    inches = NUMBER_POINTS / 72 + 0.075 * longest
    margin = inches / (axes.figure.get_figwidth() - inches - 0.2)
    for order, node in enumerate(dict.fromkeys(nodes)):
        lanes = [rank for rank, other in enumerate(nodes) if other == node]
        for stretch in np.split(lanes, np.flatnonzero(np.diff(lanes) != 1) + 1):  # of neighbouring lanes
            low = int(stretch[0])
            high = int(stretch[-1])
            if order % 2 == 0:
                axes.axhspan(low - 0.5, high + 0.5, -margin, 1, color=BAND, zorder=0, linewidth=0, clip_on=False)
            if order % named == 0:
                names[(low + high) / 2] = _node_text(identities[low], hosts)
    every = 2 ** max(0, ceil(log2(0.14 / lane_inches)))
    numbers = range(0, len(nodes), every)
    axes.set_yticks(numbers, [f"{rank}" for rank in numbers], size=7, color=FAINT)
    axes.yaxis.remove_overlapping_locs = False  # the name of a node with one rank has the position of the rank's number
    axes.set_yticks(list(names), names.values(), minor=True, size=8)
    axes.tick_params(axis="y", length=0, pad=2)
    axes.tick_params(axis="y", which="minor", length=0, pad=NUMBER_POINTS)
    axes.spines["left"].set_visible(False)


def _node_text(identity: dict, hosts: bool) -> str:
    """Return "node 3", or with `hosts` "node 3 · cn07": the host's name without its domain."""
    host = f" · {identity['host'].split('.')[0][:16]}"
    return f"node {identity['node']}{host if hosts else ''}"


def lane_height(ranks: int, most: float) -> float:
    """Return a lane's height in inches: 0.2, or less if all ranks would not fit into `most`."""
    return min(0.2, most / ranks)


def lane_order(run: Run) -> np.ndarray:
    """Return (R,) indices into run.ranks, from the top lane down."""
    return np.arange(len(run.ranks)) if run.mesh is None else run.mesh.order


def _label_places(axes: Axes, run: Run, lane_inches: float) -> None:
    """Write "stage 0 shard 1 (rank 3)" left of the lanes, as many as fit, with the host if there are several nodes.

    Draws bands behind every other replica or, of a single replica, every other stage.
    """
    order = lane_order(run)
    mesh = run.mesh
    every = 2 ** max(0, ceil(log2(0.14 / lane_inches)))
    labels = []
    for place in order[::every].tolist():
        host = f", {run.ranks[place].identity['host'].split('.')[0][:16]}" if len(run.nodes) > 1 else ""
        labels.append(f"{mesh.name(place)} (rank {run.rank_numbers[place]}{host})")
    axes.set_yticks(range(0, len(order), every), labels, size=7.5, color=INK)
    axes.tick_params(axis="y", length=0, pad=4)
    axes.spines["left"].set_visible(False)
    bands = (mesh.replica if mesh.replicas > 1 else mesh.stage)[order]
    stretches = np.split(np.arange(len(bands)), np.flatnonzero(np.diff(bands)) + 1)
    for lanes in stretches[::2] if len(stretches) < len(bands) else ():
        axes.axhspan(lanes[0] - 0.5, lanes[-1] + 0.5, color=BAND, zorder=0, linewidth=0)


def number_microbatches(axes: Axes, measured: TimedRun, first: int, count: int) -> None:
    """Write each microbatch's number, counted from 1, into its forward and its backward where the bar is wide enough.

    Covers `count` measured steps from index `first`. Set the limits of the axes first.
    """
    times = measured.times
    run = measured.run
    begin = int(times.start_ns[first].min())
    steps = times.steps[first : first + count]
    low, high = axes.get_xlim()
    inches_a_ms = axes.figure.get_figwidth() * 0.8 / (high - low)
    numbers = []
    for row, place in enumerate(lane_order(run).tolist()):
        passes = passes_of(run.ranks[place].records)
        wide = LETTER_INCHES * (np.log10(passes.microbatch + 1).astype(int) + 1.4)
        fits = np.isin(passes.step, steps) & ((passes.end - passes.start) * 1e-6 * inches_a_ms > wide)
        for index in np.flatnonzero(fits).tolist():
            middle = ((passes.start[index] + passes.end[index]) / 2 - begin) * 1e-6
            numbers.append((middle, row, passes.microbatch[index] + 1, PHASES[passes.phase[index]]))
    for middle, row, number, phase in numbers if len(numbers) <= MOST_NUMBERS else ():
        box = {"facecolor": COLOUR[phase], "edgecolor": "none", "pad": 0.8}  # hides the sums that cut the bar
        ink = "white" if phase == "backward" else INK
        axes.text(middle, row, f"{number}", ha="center", va="center_baseline", size=7, color=ink, bbox=box)
