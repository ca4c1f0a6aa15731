"""Plot of every rank's phases in a few steps around the representative one, and of the ports' rates below.

Who waits for whom, and is a port full then? A port's lane shows its node's rate in (upwards) and out (downwards)
beside its link's rate. For a pipeline, one step is drawn, with microbatch numbers.
"""

import numpy as np
from matplotlib.figure import Figure

from traces.plots import look
from traces.plots.lanes import LANE_INCHES, draw_lanes, label_lanes, lane_height, lanes_of, number_microbatches
from traces.read.trace_files import NodeCounters
from traces.read.traffic import WAYS
from traces.units import count_text, short_ms
from traces.verdict.summary import TimedRun
from traces.verdict.titles import title_lines

STEPS = 3
TOO_LONG = 1.5  # a window of steps is too long if it lasts this many times as long as the shortest
PORT_INCHES = 0.34
MOST_PORTS = 16  # more lanes would be too thin; the plot of ports shows all nodes


def draw(measured: TimedRun) -> Figure:
    """Draw the timeline of one run, ranks grouped by node, or if they share models, by replica, stage and shard."""
    ranks = len(measured.run.ranks)
    has_stages = measured.diagnosis.evidence.pipeline is not None
    lane = min(LANE_INCHES, 9.0 / ranks) if has_stages else lane_height(ranks, 9.0)
    counters = [one for one in measured.run.counters if len(one.records) > 1]
    ports = counters if len(counters) <= MOST_PORTS else []
    heights = [lane * ranks, *([PORT_INCHES * len(ports)] if ports else [])]
    first, count = _window(measured, 1 if has_stages else STEPS)
    lanes = lanes_of(measured, first, count)
    notes = look.facts([measured])
    error_ns = measured.run.clock_error_ns
    if error_ns:
        notes.append(f"clocks aligned to {error_ns * 1e-3:.0f} µs")
    inches = sum(heights) + 0.7 + 0.2 * bool(ports)
    steps = count_text(measured.figures["steps"], "step")
    facts = f"{short_ms(measured.figures['step_ms'])} ms a step, the median of {steps}"
    title = title_lines(measured, "timeline", facts)
    with look.page(9, inches, *title, look.legend_handles(lanes.parts), notes) as figure:
        top, *below = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        draw_lanes(top, lanes, ranks, lane)
        label_lanes(top, measured, lane, hosts=True)
        if has_stages:
            number_microbatches(top, measured, first, count)
        _mark_steps(top, measured, first, count)
        for axes in below:
            _draw_ports(axes, measured, first, count, ports)
        figure.axes[-1].set_xlabel("milliseconds", labelpad=2)
    return figure


def _window(measured: TimedRun, most: int) -> tuple[int, int]:
    """Return (index of the first step, number of steps): at most `most` consecutive ones near the representative step.

    The representative step is in the middle, unless the window would have a step so long that others vanish.
    """
    steps = measured.times.steps
    seconds = measured.times.step_seconds
    middle = measured.times.representative()
    count = min(most, len(steps))
    places = range(max(0, middle - count + 1), min(middle, len(steps) - count) + 1)
    # Steps that are not consecutive may lie minutes apart.
    places = [first for first in places if steps[first + count - 1] - steps[first] == count - 1]
    if not places:
        return middle, 1
    shortest = min(seconds[first : first + count].sum() for first in places)
    alike = [first for first in places if seconds[first : first + count].sum() < TOO_LONG * shortest]
    return min(alike, key=lambda first: abs(first + count // 2 - middle)), count


def _mark_steps(axes, measured: TimedRun, first: int, count: int) -> None:
    times = measured.times
    begin = times.start_ns[first].min()
    for index in range(first, first + count):
        left = (times.start_ns[index].min() - begin) * 1e-6
        axes.axvline(left, color=look.INK, linewidth=0.8)
        text = f"step {times.steps[index]}"
        look.note(axes, text, (left, 1), (3, 2), xycoords=("data", "axes fraction"), size=8, color=look.FAINT)


def _draw_ports(axes, measured: TimedRun, first: int, count: int, counters: list[NodeCounters]) -> None:
    """Draw the rates in the same steps as the ranks above, a lane for each node, node 0 on top."""
    times = measured.times
    begin = int(times.start_ns[first].min())
    end = int(times.end_ns[first + count - 1].max())
    found = [_rates(one.records, begin, end) for one in counters]
    links = [link[way] for link in measured.run.links.values() for way in WAYS]
    # Half a lane is as high as the rate of the fastest link, or without links as the highest rate.
    full = max([1.0, *(links or [rates[way].max() for _, rates in found for way in WAYS])])
    for row, (one, (moment, rates)) in enumerate(zip(counters, found, strict=True)):
        for way, sign, colour in (("in", -1, look.BLUE), ("out", 1, look.ORANGE)):
            level = row + sign * 0.46 * rates[way] / full
            axes.stairs(level, (moment - begin) * 1e-6, baseline=row, fill=True, color=colour, linewidth=0)
            if link := measured.run.links.get(one.node):
                axes.axhline(row + sign * 0.46 * link[way] / full, color=look.INK, lw=0.6, ls=(0, (3, 2)))
        axes.axhline(row, color=look.FAINT, linewidth=0.4)
    axes.set_ylim(len(counters) - 0.5, -0.5)
    axes.set_yticks(range(len(counters)), [f"node {one.node} port" for one in counters], size=7.5)
    axes.tick_params(axis="y", length=0, pad=2)
    axes.spines["left"].set_visible(False)
    text = f"in above, out below each line; dashed: the link's rate; full height {full * 1e-6:.3g} MB/s"
    axes.set_title(text, loc="right", size=7.5, color=look.FAINT, pad=2)


def _rates(records: np.ndarray, begin: int, end: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return (K + 1,) times in ns from begin to end, and the (K,) mean rates between them, bytes/s."""
    inside = records["time"][(records["time"] > begin) & (records["time"] < end)]
    moments = np.concatenate([[begin], inside, [end]])
    seconds = np.maximum(np.diff(moments), 1) * 1e-9
    return moments, {way: np.diff(np.interp(moments, records["time"], records[way])) / seconds for way in WAYS}
