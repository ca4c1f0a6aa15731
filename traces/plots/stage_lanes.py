"""Lanes of ranks that share models: by copy, stage and part; micro-steps' numbers, as there is room."""

from itertools import pairwise
from math import ceil, log2

import numpy as np
from matplotlib.axes import Axes

from traces.plots.look import BAND, COLOUR, INK
from traces.read.pipeline import passes_of
from traces.read.runs import Run
from traces.record.phases import PHASES
from traces.verdict.summary import TimedRun

LANE_INCHES = 0.32  # of a pipeline's lanes, where they are few: a micro-step's number is read at once
DIGIT_POINTS, LETTER_INCHES = 7.0, 0.068
MOST_NUMBERS = 1000


def lane_order(run: Run) -> np.ndarray:
    """(R,) indices into run.ranks, from the top lane down."""
    return np.arange(len(run.ranks)) if run.mesh is None else run.mesh.order


def label_places(axes: Axes, run: Run, lane_inches: float) -> None:
    """ "stage 0 part 1 (rank 3)" left of the lanes, as many as their height has room for.

    Of several nodes the host, too. Bands behind every other copy or, where there is one, stage.
    """
    order, mesh = lane_order(run), run.mesh
    every = 2 ** max(0, ceil(log2(0.14 / lane_inches)))
    shown = range(0, len(order), every)
    axes.set_yticks(shown, [_label(run, int(order[row])) for row in shown], size=7.5, color=INK)
    axes.tick_params(axis="y", length=0, pad=4)
    axes.spines["left"].set_visible(False)
    bands = (mesh.copy if mesh.copies > 1 else mesh.stage)[order]
    edges = [0, *(np.flatnonzero(np.diff(bands)) + 1).tolist(), len(bands)]
    if len(edges) - 1 < len(bands):
        for low, high in list(pairwise(edges))[::2]:
            axes.axhspan(low - 0.5, high - 0.5, color=BAND, zorder=0, linewidth=0)


def _label(run: Run, place: int) -> str:
    host = f", {run.ranks[place].identity['host'].split('.')[0][:16]}" if len(run.nodes) > 1 else ""
    return f"{run.mesh.name(place)} (rank {run.rank_numbers[place]}{host})"


def number_micro_steps(axes: Axes, measured: TimedRun, first: int, count: int) -> None:
    """Each micro-step's number, from 1 on, in the middle of its forward and its backward, where the bar is wide enough.

    `count` steps from index `first` of the measured steps; the axes' limits are set.
    """
    times, run = measured.times, measured.run
    begin, steps = int(times.start_ns[first].min()), times.steps[first : first + count]
    low, high = axes.get_xlim()
    inches_a_ms = axes.figure.get_figwidth() * 0.8 / (high - low)
    numbers = []
    for row, place in enumerate(lane_order(run).tolist()):
        passes = passes_of(run.ranks[place].records)
        wide = LETTER_INCHES * (np.log10(passes.micro_step + 1).astype(int) + 1.4)
        fits = np.isin(passes.step, steps) & ((passes.end - passes.start) * 1e-6 * inches_a_ms > wide)
        for index in np.flatnonzero(fits).tolist():
            middle = ((passes.start[index] + passes.end[index]) / 2 - begin) * 1e-6
            numbers.append((middle, row, passes.micro_step[index] + 1, PHASES[passes.phase[index]]))
    for middle, row, number, phase in numbers if len(numbers) <= MOST_NUMBERS else ():
        box = {"facecolor": COLOUR[phase], "edgecolor": "none", "pad": 0.8}  # over the sums that cut the bar
        ink = "white" if phase == "backward" else INK
        axes.text(
            middle, row, f"{number}", ha="center", va="center_baseline", size=DIGIT_POINTS, color=ink, bbox=box
        )  # fmt: skip
