"""Plot: a bar for each rank, its median step cut into computing, moving data and each kind of waiting."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from traces.plots import look
from traces.plots.lanes import label_nodes, lane_height
from traces.read.analysis import MeasuredRun
from traces.read.wait_states import STATES, find_wait_states
from traces.record.phases import COMPUTE, COPY, EXCHANGE, INDEX, STEP

# Hatched differently, on greys of different lightness: they have to differ in a grey print too.
STATE_STYLE = {
    "late_broadcast": ("until the broadcast's root came", "#E4E4E4", "//////"),
    "early_reduce": ("before any part of the sum was there", "#FBFBFB", "......"),
    "late_sender": ("for the last part of the sum", "#D0D0D0", "xxxxx"),
    "wait_at_nxn": ("for the last rank of all", "#F0F0F0", "\\\\\\\\"),
}
PLAIN = {"data": look.COLOUR["data"], "computing": look.BLUE, "copies": look.PURPLE, "transfer": look.VERMILLION}

LEAST_SHARE = 0.002  # of a step: what is shorter is no more than a hair


def draw(measured: MeasuredRun) -> Figure:
    bars = wait_table(measured)
    ranks = len(measured.run.ranks)
    lane = max(lane_height(ranks, 7.0), 0.08)
    top, bottom = 0.82, 0.62
    height = top + bottom + lane * ranks
    with look.styled():
        figure = Figure(figsize=(9, height))
        look.headline(figure, _finding(measured, bars))
        axes = figure.add_axes((0.15, bottom / height, 0.83, lane * ranks / height))
        left = np.zeros(ranks)
        for name, milliseconds in bars.items():
            axes.barh(range(ranks), milliseconds, 0.78, left, **_style(name))
            left += milliseconds
        axes.set_ylim(ranks - 0.4, -0.6)
        axes.set_xlim(0, left.max() * 1.01)
        axes.set_xlabel("milliseconds of the median step", labelpad=2)
        label_nodes(axes, measured, lane, margin=0.165, hosts=False)
        _draw_legend(figure, bars)
        look.footnote(figure, [measured], look.median_note([measured]))
    return figure


def wait_table(measured: MeasuredRun) -> dict[str, np.ndarray]:
    """(R,) milliseconds of each part that can be seen, medians over steps: plain parts, wait states, and "other"."""
    times = measured.times
    ranks = len(measured.run.ranks)
    states = find_wait_states(measured.run).per_step(times.steps, ranks) * 1e3

    def of(*names):
        return times.seconds[:, :, [INDEX[name] for name in names]].sum(axis=2) * 1e3

    parts = {"data": of("data"), "computing": of(*COMPUTE), "copies": of(*COPY)}
    parts["transfer"] = np.maximum(of(*EXCHANGE, "wait") - states.sum(axis=2), 0)
    parts |= {name: states[:, :, index] for index, name in enumerate(STATES)}
    parts["other"] = np.maximum(of(STEP) - sum(parts.values()), 0)
    medians = {name: np.median(table, axis=0) for name, table in parts.items()}
    step = np.median(of(STEP))
    return {name: row for name, row in medians.items() if row.max() > LEAST_SHARE * step}


def _finding(measured: MeasuredRun, bars: dict[str, np.ndarray]) -> str:
    waits = sum((row for name, row in bars.items() if name in STATES), np.zeros(len(measured.run.ranks)))
    step = sum(bars.values())
    most = int(np.argmax(waits))
    rank = measured.run.ranks[most].identity["rank"]
    if waits[most] < 0.05 * step[most]:
        return f"{measured.label}: no rank waits more than {waits[most] / step[most]:.0%} of its step for others"
    kind = max((name for name in bars if name in STATES), key=lambda name: bars[name][most])
    return (
        f"{measured.label}: rank {rank} waits {waits[most] / step[most]:.0%} of its step, most {STATE_STYLE[kind][0]}"
    )


def _style(name: str) -> dict:
    if name in STATE_STYLE:
        _, colour, hatch = STATE_STYLE[name]
        return {"facecolor": colour, "edgecolor": "#9A9A9A", "hatch": hatch, "linewidth": 0}
    return {"facecolor": PLAIN.get(name, look.COLOUR["other"]), "edgecolor": "white", "linewidth": 0.4}


def _draw_legend(figure: Figure, bars) -> None:
    width, height = figure.get_size_inches()
    handles = [
        Patch(**_style(name), label=f"waits {STATE_STYLE[name][0]}" if name in STATE_STYLE else name) for name in bars
    ]
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0.05 / width, 1 - 0.42 / height), ncols=len(handles),
        frameon=False, handlelength=1.6, handletextpad=0.5, columnspacing=1.2, fontsize=min(8, 56 / len(handles)),
    )  # fmt: skip
