"""Plot of every node's port during one exchange, by strategy. Which ports are full, which idle, and when?

Each node has a lane, as high as the port's rate. Bytes in are drawn upwards from its middle, bytes out downwards.
"""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from traces.plots import look
from traces.units import count_text, short_ms

IN = {"facecolor": look.BLUE, "linewidth": 0}
OUT = {"facecolor": look.ORANGE, "linewidth": 0}
IDLE = "#E6E6E6"
HALF = 0.44  # of a lane: the height of a full direction
LANE_INCHES = 0.2
BETWEEN_INCHES = 0.34
AXIS_INCHES = 0.45


def draw(exchanges: list[dict], facts: dict) -> Figure:
    """Draw exchanges, each with name, `seen` (a caption), bytes, seconds, bound_s, piece_s and `used`.

    used: (pieces, nodes, in/out) fraction of a port's rate, in pieces of piece_s seconds. facts: mpi_library, machine,
    ranks, and the ports' rate in bytes/s.
    """
    nodes = exchanges[0]["used"].shape[1]
    inches = len(exchanges) * (LANE_INCHES * nodes + BETWEEN_INCHES) + AXIS_INCHES
    handles = [Patch(**IN, label="in"), Patch(**OUT, label="out"), Patch(facecolor=IDLE, label="the port idles")]
    notes = [
        look.short_library(facts["mpi_library"]),
        f"{facts['machine']['processor']}, {facts['machine']['cores']} cores",
        f"the switch's counters, pieces of {short_ms(exchanges[0]['piece_s'] * 1e3)} ms",
    ]
    with look.page(9, inches, finding(exchanges), _subtitle(exchanges, facts), handles, notes) as figure:
        panels = figure.subplots(len(exchanges), sharex=True, squeeze=False)[:, 0]
        for axes, exchange in zip(panels, exchanges, strict=True):
            _draw_exchange(axes, exchange)
        longest = max(_end_ms(exchange) for exchange in exchanges)
        panels[-1].set_xlim(0, longest * 1.01)
        panels[-1].set_xlabel("milliseconds since the exchange began")
    return figure


def finding(exchanges: list[dict]) -> str:
    """Say how much of the ports' rate the first and the last strategy use."""
    first = exchanges[0]
    last = exchanges[-1]
    return f"{first['name']} uses {_share(first):.0%} of what the ports can carry, {last['name']} {_share(last):.0%}"


def _share(exchange: dict) -> float:
    return float(np.minimum(exchange["used"], 1).mean())


def _subtitle(exchanges: list[dict], facts: dict) -> str:
    size = exchanges[0]["bytes"] / 1e6
    nodes = exchanges[0]["used"].shape[1]
    place = f"{facts['ranks']} ranks on {count_text(nodes, 'node')}"
    lane = f"a lane is a node's port, full at {facts['rate'] * 8 / 1e6:,.0f} Mbit/s in and as much out"
    return f"one exchange of {size:.4g} MB of gradients, {place}; {lane}"


def _end_ms(exchange: dict) -> float:
    return len(exchange["used"]) * exchange["piece_s"] * 1e3


def _draw_exchange(axes, exchange: dict) -> None:
    used = np.minimum(exchange["used"], 1)
    end = _end_ms(exchange)
    edges = np.linspace(0, end, len(used) + 1)
    for node in range(used.shape[1]):
        axes.fill_between([0, end], node - HALF, node + HALF, facecolor=IDLE, linewidth=0)
        for way, style, up in ((0, IN, -HALF), (1, OUT, HALF)):
            height = np.append(used[:, node, way], 0.0) * up
            axes.fill_between(edges, node, node + height, step="post", **style)
    axes.set_ylim(used.shape[1] - 0.5, -0.5)
    axes.set_yticks(range(used.shape[1]), [f"node {node}" for node in range(used.shape[1])], size=7.5)
    axes.tick_params(axis="both", length=0)
    axes.spines[["left", "bottom"]].set_visible(False)
    _write_title(axes, exchange)


def _write_title(axes, exchange: dict) -> None:
    """Write the name, the caption `seen`, and the time."""
    bound = f"{exchange['seconds'] / exchange['bound_s']:.2f} times the bound"
    text = f"{short_ms(exchange['seconds'] * 1e3, 3)} ms, {bound}, {_share(exchange):.0%} of the ports in use"
    name = axes.set_title(exchange["name"], loc="left", size=10, weight="bold", pad=3)
    beside = {"xycoords": name, "textcoords": "offset points", "size": 9}
    seen = axes.annotate(exchange["seen"], (1, 0), (8, 2.5), color=look.INK, **beside)
    axes.annotate(text, (1, 0), (14, 2.5), color=look.FAINT, **beside | {"xycoords": seen})
