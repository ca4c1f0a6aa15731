"""The ports' lanes under a timeline: of each node the rate in (upwards) and out (downwards) against its link's rate."""

import numpy as np

from traces.plots import look
from traces.read.analysis import MeasuredRun
from traces.record.counters import NodeCounters

LANE_INCHES = 0.34
MOST_NODES = 16  # beyond that the lanes would be hairs; port_bars.py shows all nodes


def lanes_of(measured: MeasuredRun) -> list[NodeCounters]:
    """The counters that there is room to show: of all nodes or, of many, none."""
    counters = [one for one in measured.run.counters if len(one.records) > 1]
    return counters if len(counters) <= MOST_NODES else []


def draw_port_lanes(axes, measured: MeasuredRun, first: int, count: int, counters: list[NodeCounters]) -> None:
    """Rates in the same steps and milliseconds as lanes.draw_lanes, one lane a node, node 0 on top."""
    times = measured.times
    begin, end = int(times.start_ns[first].min()), int(times.end_ns[first + count - 1].max())
    links = {link["node"]: link for link in measured.run.config.get("links") or []}
    full = _full_scale(counters, links, begin, end)
    for row, one in enumerate(counters):
        moment, rates = _rates(one.records, begin, end)
        for way, sign, colour in (("in", -1, look.BLUE), ("out", 1, look.ORANGE)):
            level = row + sign * 0.46 * rates[way] / full
            axes.stairs(level, (moment - begin) * 1e-6, baseline=row, fill=True, color=colour, linewidth=0)
            if one.node in links:
                axes.axhline(row + sign * 0.46 * links[one.node][way] / full, color=look.INK, lw=0.6, ls=(0, (3, 2)))
        axes.axhline(row, color=look.FAINT, linewidth=0.4)
    axes.set_xlim(0, (end - begin) * 1e-6)
    axes.set_ylim(len(counters) - 0.5, -0.5)
    axes.set_yticks(range(len(counters)), [f"node {one.node} port" for one in counters], size=7.5)
    axes.tick_params(axis="y", length=0, pad=2)
    axes.spines["left"].set_visible(False)
    axes.annotate(
        f"in above, out below each line; dashed: the link's rate; full height {full * 1e-6:.3g} MB/s", (1, 1), (0, 2),
        xycoords="axes fraction", textcoords="offset points", ha="right", size=7.5, color=look.FAINT,
    )  # fmt: skip


def _rates(records: np.ndarray, begin: int, end: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """(K + 1,) moments in ns and the (K,) mean rates between them, bytes/s, from begin to end."""
    inside = records["time"][(records["time"] > begin) & (records["time"] < end)]
    moments = np.concatenate([[begin], inside, [end]])
    seconds = np.maximum(np.diff(moments), 1) * 1e-9
    return moments, {way: np.diff(np.interp(moments, records["time"], records[way])) / seconds for way in ("in", "out")}


def _full_scale(counters, links: dict, begin: int, end: int) -> float:
    """The rate that fills half a lane: the fastest link's, or what was reached where nothing was probed."""
    rates = [link[way] for link in links.values() for way in ("in", "out")]
    if not rates:
        rates = [rate for one in counters for way in _rates(one.records, begin, end)[1].values() for rate in way]
    return max(max(rates, default=1.0), 1.0)
