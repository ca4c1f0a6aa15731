"""Plot: a heat map of ranks and steps, once of computing, once of waiting. Which rank is slow, and when?"""

import numpy as np
from matplotlib.figure import Figure

from traces.plots import look
from traces.plots.lanes import label_nodes, lane_height
from traces.read.analysis import MeasuredRun
from traces.record.phases import COMPUTE, EXCHANGE, INDEX
from traces.verdict.ranking import short_ms

MOST_COLUMNS = 400  # more steps than that are averaged: a picture has no more columns to show
STANDS_OUT = 1.2


def draw(measured: MeasuredRun) -> Figure:
    times = measured.times
    computing = times.seconds[:, :, [INDEX[name] for name in COMPUTE]].sum(axis=2) * 1e3
    waiting = (times.waiting[:, :, [INDEX[name] for name in EXCHANGE]].sum(axis=2) + _waits(times)) * 1e3
    ranks = computing.shape[1]
    lane = lane_height(ranks, 4.0)
    panel, gap, top, bottom = lane * ranks, 0.62, 0.78, 0.62
    height = top + 2 * panel + gap + bottom
    with look.styled():
        figure = Figure(figsize=(9, height))
        look.headline(figure, _finding(measured, computing))
        for place, (table, text) in enumerate(((computing, "computing"), (waiting, "waiting for others"))):
            low = (bottom + (1 - place) * (panel + gap)) / height
            axes = figure.add_axes((0.13, low, 0.74, panel / height))
            _draw_panel(figure, axes, measured, table, text, lane, (0.885, low, 0.012, panel / height))
        axes.set_xlabel("step", labelpad=2)
        look.footnote(figure, [measured])
    return figure


def _waits(times) -> np.ndarray:
    return times.seconds[:, :, INDEX["wait"]]


def _finding(measured: MeasuredRun, computing: np.ndarray) -> str:
    medians = np.median(computing, axis=0)
    typical = np.median(medians[medians > 0]) if (medians > 0).any() else 0.0
    slowest = int(np.argmax(medians))
    ratio = medians[slowest] / typical if typical else 1.0
    rank = measured.run.ranks[slowest].identity["rank"]
    if ratio >= STANDS_OUT:
        return f"{measured.label}: rank {rank} computes {ratio:.1f} times as long as the median rank"
    return f"{measured.label}: all ranks compute alike, the slowest (rank {rank}) {ratio - 1:.0%} above the median"


def _draw_panel(figure, axes, measured, table, text, lane, bar_place) -> None:
    steps = measured.times.steps
    columns = _columns(table)
    # One stall of a second must not leave all else one colour.
    highest = max(float(np.quantile(columns, 0.995)), 1e-6)
    image = axes.imshow(
        columns.T, aspect="auto", interpolation="nearest", cmap="cividis", vmin=0, vmax=highest,
        extent=(steps[0] - 0.5, steps[-1] + 0.5, table.shape[1] - 0.5, -0.5), zorder=1,
    )  # fmt: skip
    axes.set_title(f"{text}, median {short_ms(float(np.median(table)))} ms", loc="left", size=9, pad=3)
    for spine in axes.spines.values():
        spine.set_visible(False)
    label_nodes(axes, measured, lane, margin=0.165, hosts=False)
    bar = figure.colorbar(image, cax=figure.add_axes(bar_place))
    bar.outline.set_visible(False)
    bar.ax.set_title("ms", size=8, loc="left", pad=4)
    bar.ax.tick_params(labelsize=7, length=2)


def _columns(table: np.ndarray) -> np.ndarray:
    """(S or fewer, R): neighbouring steps averaged where there are more than a picture has room for."""
    together = -(-len(table) // MOST_COLUMNS)
    return np.stack([table[first : first + together].mean(axis=0) for first in range(0, len(table), together)])
