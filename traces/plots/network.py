"""Plots of the network's traffic. Whose port is full, and who sends how much to whom?

Ports: bytes through each node's port in a step, from the counters, beside the port's capacity in that time; a mark
shows the bytes of the strategy's messages. Messages: bytes from each rank to each other in one exchange, and between
nodes, computed from the messages alone.
"""

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from traces.plots import look
from traces.read.traffic import WAYS
from traces.units import bytes_text, short_ms
from traces.verdict.summary import TimedRun
from traces.verdict.titles import title_lines

STYLES = {
    "in": {"facecolor": look.BLUE, "edgecolor": "white", "linewidth": 0},
    "out": {"facecolor": look.ORANGE, "edgecolor": "white", "linewidth": 0, "hatch": "////"},
}
RATE_STYLE = {"color": look.INK, "linestyle": (0, (3, 2)), "linewidth": 1.1}
MARK_STYLE = {"marker": "D", "color": "white", "markeredgecolor": look.INK, "linestyle": "", "markersize": 4.5}
DECADES = 3
MOST_TICKS = 12
MOST_WITH_NUMBERS = 8  # nodes; with more, cells are too small for numbers


def draw_ports(measured: TimedRun) -> Figure:
    """Draw bytes through ports. All nodes must have counters. Rates are drawn only if all nodes have links."""
    traffic = measured.diagnosis.evidence.traffic
    sent = measured.diagnosis.evidence.predicted_bytes
    links = [measured.run.links.get(node) for node in traffic.nodes]
    bars = {way: traffic.step_bytes(way) * 1e-6 for way in WAYS}
    step_ms = measured.figures["step_ms"]
    room = {way: np.array([link[way] for link in links]) * step_ms * 1e-9 for way in WAYS} if all(links) else None
    handles = [Patch(**STYLES[way], label=way) for way in WAYS]
    if room is not None:
        text = f"the port's measured rate for {short_ms(step_ms)} ms, a step"
        handles.append(Line2D([], [], **RATE_STYLE, label=text))
    if sent is not None:
        handles.append(Line2D([], [], **MARK_STYLE, label="the strategy's messages"))
    width = min(11.0, max(7.6, 2.4 + 0.9 * len(traffic.nodes)))
    notes = [*look.facts([measured]), look.median_note([measured])]
    title = title_lines(measured, "ports", *_ports(bars, room))
    with look.page(width, 3.2, *title, handles, notes) as figure:
        axes = figure.subplots()
        for shift, way in ((-0.21, "in"), (0.21, "out")):
            places = np.arange(len(bars[way])) + shift
            axes.bar(places, bars[way], 0.38, **STYLES[way])
            if room is not None:
                axes.hlines(room[way], places - 0.2, places + 0.2, **RATE_STYLE)
            if sent is not None:
                axes.plot(places, sent[way] * 1e-6, **MARK_STYLE)
        axes.set_xticks(range(len(traffic.nodes)), [f"node {node}" for node in traffic.nodes])
        axes.set_ylabel("MB a step")
        axes.tick_params(axis="x", length=0)
    return figure


def _ports(bars: dict, room: dict | None) -> tuple[str, str]:
    """Describe the range of the nodes' bytes in both directions, and the fullest port."""
    text = " and ".join(f"{_range(bars[way])} {way}" for way in WAYS)
    text = f"a node's port passes {text}, a step"
    if room is None or not all((room[way] > 0).all() for way in WAYS):
        return text, ""
    used = " and ".join(f"{(bars[way] / room[way]).max():.0%} {way}" for way in WAYS)
    return text, f"at most {used} of what it can carry in that time"


def _range(megabytes: np.ndarray) -> str:
    """Return the range as text: "4.3 MB", "2.1 MB to 9.1 MB"."""
    low, high = (bytes_text(amount * 1e6, 2) for amount in (megabytes.min(), megabytes.max()))
    return low if low == high else f"{low} to {high}"


def draw_messages(measured: TimedRun, matrix: np.ndarray, nodes: list[int]) -> Figure:
    """Draw messages. matrix: (N, N) bytes from rank (row) to rank (column). nodes: each rank's node."""
    between = node_matrix(matrix, nodes)
    highest = max(matrix.max(), between.max(), 1) * 1e-6
    norm = LogNorm(highest / 10**DECADES, highest)
    with look.page(9, 4.2, *title_lines(measured, "messages", _messages(between))) as figure:
        left, right = figure.subplots(1, 2)
        _draw_table(left, matrix * 1e-6, norm, "rank")
        for place in np.flatnonzero(np.diff(nodes)) + 0.5:
            left.axhline(place, color=look.FAINT, linewidth=0.6)
            left.axvline(place, color=look.FAINT, linewidth=0.6)
        image = _draw_table(right, between * 1e-6, norm, "node")
        for (row, column), value in np.ndenumerate(between * 1e-6):
            if value > 0 and len(between) <= MOST_WITH_NUMBERS:
                ink = "white" if norm(value) > 0.5 else look.INK
                right.text(column, row, f"{value:.2g}", ha="center", va="center", size=7.5, color=ink)
        look.draw_colours(right, image, "MB")
    return figure


def node_matrix(matrix: np.ndarray, nodes: list[int]) -> np.ndarray:
    """Return (M, M) bytes between nodes, 0 within one."""
    member = np.array([[node == number for node in nodes] for number in sorted(set(nodes))], np.float64)
    between = member @ matrix @ member.T
    np.fill_diagonal(between, 0)
    return between


def _draw_table(axes, table: np.ndarray, norm, what: str):
    image = axes.imshow(np.ma.masked_equal(table, 0), cmap="cividis_r", norm=norm, interpolation="nearest")
    axes.set_xlabel(f"to {what}", labelpad=2)
    axes.set_ylabel(f"from {what}", labelpad=2)
    every = max(1, -(-len(table) // MOST_TICKS))
    axes.set_xticks(range(0, len(table), every))
    axes.set_yticks(range(0, len(table), every))
    return image


def _messages(between: np.ndarray) -> str:
    into = between.sum(axis=0) * 1e-6
    out = between.sum(axis=1) * 1e-6
    if not into.max():
        return "nothing leaves a node"
    return f"in an exchange a node receives {_range(into)} and sends {_range(out)}"
