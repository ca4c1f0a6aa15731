"""Plots of the ranks. Which rank is slow, and when? What does each rank wait for?

draw_map: two heatmaps, rank by step: compute time and waiting time. draw_waits: one bar per rank, its median step split
into computing, moving data and each kind of waiting.
"""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from traces.plots import look
from traces.plots.lanes import label_lanes, lane_height, lane_order
from traces.read.waits import STATES
from traces.record.phases import COMPUTE, EXCHANGE, PIPELINE
from traces.units import short_ms
from traces.verdict.summary import TimedRun, wait_table
from traces.verdict.titles import title_lines

MOST_COLUMNS = 400  # with more steps than this, neighbouring steps are averaged into one column
LEAST_SCALE_MS = 0.01
# {state: (label, colour, hatching)}; still distinguishable in greyscale.
STATE_STYLE = {
    "late_broadcast": ("for the root to enter the broadcast", "#E4E4E4", "//////"),
    "early_reduce": ("as root for the first sender", "#FBFBFB", "......"),
    "late_sender": ("for a late sender", "#D0D0D0", "xxxxx"),
    "wait_at_nxn": ("for the last rank to enter a collective", "#F0F0F0", "\\\\\\\\"),
}
PLAIN = {"data": look.COLOUR["data"], "computing": look.BLUE, "copies": look.PURPLE, "transfer": look.VERMILLION}


def draw_map(measured: TimedRun) -> Figure:
    times = measured.times
    waiting = times.waiting_in(*EXCHANGE, *PIPELINE) + times.phase("wait")
    tables = {"computing": times.phase(*COMPUTE) * 1e3, "waiting for others": waiting * 1e3}
    ranks = len(measured.run.ranks)
    lane = lane_height(ranks, 4.0)
    low, high = _range(np.median(tables["computing"], axis=0))
    facts = f"ranks compute {low} to {high} ms a step, medians"
    title = title_lines(measured, "ranks", facts)
    with look.page(9, 2 * lane * ranks + 1.15, *title, notes=look.facts([measured])) as figure:
        panels = figure.subplots(2, 1)
        for axes, (text, table) in zip(panels, tables.items(), strict=True):
            _draw_panel(axes, measured, table, text, lane)
        panels[-1].set_xlabel("step", labelpad=2)
    return figure


def _range(milliseconds: np.ndarray) -> tuple[str, str]:
    """Return the smallest and the largest positive number. A server computes nothing, so its 0 is left out."""
    some = milliseconds[milliseconds > 0] if (milliseconds > 0).any() else milliseconds
    return short_ms(some.min(), 3), short_ms(some.max(), 3)


def _draw_panel(axes, measured: TimedRun, table: np.ndarray, text: str, lane: float) -> None:
    steps = measured.times.steps
    columns = average_columns(table[:, lane_order(measured.run)])
    # The cap keeps one long stall from flattening other colours; the minimum, microseconds from looking large.
    highest = max(float(np.quantile(columns, 0.995)), LEAST_SCALE_MS)
    image = axes.imshow(
        columns.T, aspect="auto", interpolation="nearest", cmap="cividis", vmin=0, vmax=highest,
        extent=(steps[0] - 0.5, steps[-1] + 0.5, table.shape[1] - 0.5, -0.5), zorder=1,
    )  # fmt: skip
    axes.set_title(f"{text}, median {short_ms(float(np.median(table)))} ms", loc="left", size=9, pad=3)
    axes.spines[:].set_visible(False)
    axes.xaxis.get_major_locator().set_params(integer=True)
    label_lanes(axes, measured, lane)
    look.draw_colours(axes, image, "ms")


def average_columns(table: np.ndarray) -> np.ndarray:
    """Return (MOST_COLUMNS or fewer, R): the means of neighbouring steps."""
    together = -(-len(table) // MOST_COLUMNS)
    return np.stack([table[first : first + together].mean(axis=0) for first in range(0, len(table), together)])


def draw_waits(measured: TimedRun) -> Figure:
    bars = wait_table(measured)
    ranks = len(measured.run.ranks)
    lane = max(lane_height(ranks, 7.0), 0.08)
    handles = [
        Patch(**_style(name), label=f"waits {STATE_STYLE[name][0]}" if name in STATE_STYLE else name) for name in bars
    ]
    notes = [*look.facts([measured]), look.median_note([measured])]
    waits = sum((row for name, row in bars.items() if name in STATES), np.zeros(ranks))
    facts = f"in exchanges, ranks wait {short_ms(waits.min(), 3)} to {short_ms(waits.max(), 3)} ms a step for others"
    title = title_lines(measured, "waits", facts)
    with look.page(9, lane * ranks + 0.52, *title, handles, notes) as figure:
        axes = figure.subplots()
        left = np.zeros(ranks)
        order = lane_order(measured.run)
        for name, milliseconds in bars.items():
            axes.barh(range(ranks), milliseconds[order], 0.78, left, **_style(name))
            left += milliseconds[order]
        axes.set_ylim(ranks - 0.4, -0.6)
        axes.set_xlim(0, left.max() * 1.01)
        axes.set_xlabel("milliseconds of the median step", labelpad=2)
        label_lanes(axes, measured, lane)
    return figure


def _style(name: str) -> dict:
    if name in STATE_STYLE:
        _, colour, hatch = STATE_STYLE[name]
        return {"facecolor": colour, "edgecolor": "#9A9A9A", "hatch": hatch, "linewidth": 0}
    return {"facecolor": PLAIN.get(name, look.COLOUR["other"]), "edgecolor": "white", "linewidth": 0.4}
