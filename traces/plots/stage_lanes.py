"""Lanes of ranks that share models, sorted by replica, stage and shard, with the numbers of the microbatches."""

from itertools import pairwise
from math import ceil, log2

import numpy as np
from matplotlib.axes import Axes

from traces.plots.look import BAND, COLOUR, INK
from traces.read.pipeline_times import passes_of
from traces.read.runs import Run
from traces.record.phases import PHASES
from traces.verdict.summary import TimedRun

LANE_INCHES = 0.32  # room for microbatch numbers, if lanes are few
DIGIT_POINTS = 7.0
LETTER_INCHES = 0.068
MOST_NUMBERS = 1000


def lane_order(run: Run) -> np.ndarray:
    """Return (R,) indices into run.ranks, from the top lane down."""
    return np.arange(len(run.ranks)) if run.mesh is None else run.mesh.order


def label_places(axes: Axes, run: Run, lane_inches: float) -> None:
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
    edges = [0, *(np.flatnonzero(np.diff(bands)) + 1).tolist(), len(bands)]
    if len(edges) - 1 < len(bands):
        for low, high in list(pairwise(edges))[::2]:
            axes.axhspan(low - 0.5, high - 0.5, color=BAND, zorder=0, linewidth=0)


def number_microbatches(axes: Axes, measured: TimedRun, first: int, count: int) -> None:
    """Write each microbatch's number, counted from 1, into its forward and its backward where the bar is wide enough.

    For `count` steps from index `first` of the measured steps. The axes' limits must be set.
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
        axes.text(
            middle, row, f"{number}", ha="center", va="center_baseline", size=DIGIT_POINTS, color=ink, bbox=box
        )  # fmt: skip
