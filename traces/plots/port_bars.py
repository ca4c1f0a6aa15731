"""Plot: bytes that pass each node's port in a step, in and out, beside what the port can carry in that time.

Measured bytes come from the nodes' counters; what the strategy's messages add up to is a mark on the bar.
"""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from traces.plots import look
from traces.read.analysis import MeasuredRun
from traces.read.node_traffic import WAYS, NodeTraffic
from traces.verdict.ranking import short_ms

STYLES = {"in": (look.BLUE, ""), "out": (look.ORANGE, "////")}


def draw(measured: MeasuredRun, traffic: NodeTraffic, links: list[dict], schedule: dict | None = None) -> Figure:
    """links: of config.json, of all nodes or empty; schedule: {"in": (M,) bytes, "out": ...} of one step, or None."""
    bars = {way: traffic.step_bytes(way) * 1e-6 for way in WAYS}
    step_s = measured.figures["step_ms"] * 1e-3
    room = {way: np.array([link[way] for link in links]) * step_s * 1e-6 for way in WAYS} if links else None
    with look.styled():
        width = min(11.0, max(7.6, 2.4 + 0.9 * len(traffic.nodes)))
        figure = Figure(figsize=(width, 4.2))
        look.headline(figure, _finding(measured, traffic, bars, room))
        axes = figure.add_axes((0.75 / width, 0.17, 1 - 0.95 / width, 0.62))
        _draw_bars(axes, bars, room, schedule)
        axes.set_xticks(range(len(traffic.nodes)), [f"node {node}" for node in traffic.nodes])
        axes.set_ylabel("MB a step")
        axes.tick_params(axis="x", length=0)
        _draw_legend(figure, width, room is not None, schedule is not None, step_s)
        look.footnote(figure, [measured], look.median_note([measured]))
    return figure


def _draw_bars(axes, bars, room, schedule) -> None:
    for shift, way in ((-0.21, "in"), (0.21, "out")):
        colour, hatch = STYLES[way]
        places = np.arange(len(bars[way])) + shift
        axes.bar(places, bars[way], 0.38, color=colour, hatch=hatch, edgecolor="white", linewidth=0)
        if room is not None:
            axes.hlines(room[way], places - 0.2, places + 0.2, color=look.INK, linestyle=(0, (3, 2)), linewidth=1.1)
        if schedule is not None:
            axes.plot(places, np.asarray(schedule[way]) * 1e-6, "D", color="white", markeredgecolor=look.INK, ms=4.5)


def _finding(measured, traffic: NodeTraffic, bars, room) -> str:
    way = max(WAYS, key=lambda name: bars[name].max())
    place = int(np.argmax(bars[way]))
    verb = {"in": "receives", "out": "sends"}[way]
    text = f"{measured.label}: node {traffic.nodes[place]} {verb} {short_ms(bars[way][place])} MB a step"
    if room is not None and room[way][place] > 0:
        text += f", {bars[way][place] / room[way][place]:.0%} of what its port can carry"
    return text


def _draw_legend(figure, width, has_room, has_schedule, step_s) -> None:
    handles = [Patch(facecolor=STYLES[way][0], hatch=STYLES[way][1], edgecolor="white", label=way) for way in WAYS]
    if has_room:
        text = f"the port's measured rate for {short_ms(step_s * 1e3)} ms, a step"
        handles.append(Line2D([], [], color=look.INK, linestyle=(0, (3, 2)), linewidth=1.1, label=text))
    if has_schedule:
        style = {"marker": "D", "color": "white", "markeredgecolor": look.INK, "linestyle": ""}
        handles.append(Line2D([], [], ms=4.5, label="the strategy's messages", **style))
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0.05 / width, 0.905), ncols=len(handles), frameon=False,
        fontsize=8, handlelength=1.6, columnspacing=1.3,
    )  # fmt: skip
