"""Plot: what every rank does when, over a few steps around the representative one, and the ports' rates below.

Who waits for whom, and is a port full meanwhile?
"""

from matplotlib.figure import Figure

from traces.plots import look
from traces.plots.lanes import draw_lanes, label_nodes, lane_height, node_text
from traces.plots.port_lanes import LANE_INCHES, draw_port_lanes, lanes_of
from traces.read.analysis import MeasuredRun, parts
from traces.verdict.ranking import short_ms

STEPS = 3


def draw(measured: MeasuredRun) -> Figure:
    """The timeline of one run, ranks grouped by node."""
    ranks = len(measured.run.ranks)
    lane = lane_height(ranks, 9.0)
    ports = lanes_of(measured)
    below = LANE_INCHES * len(ports) + 0.28 if ports else 0.0
    top, bottom = 0.92, 0.68 + below
    height = top + bottom + lane * ranks
    with look.styled():
        figure = Figure(figsize=(9, height))
        look.headline(figure, _finding(measured))
        left = 0.045 + 0.0085 * max(len(node_text(trace.identity, True)) for trace in measured.run.ranks)
        axes = figure.add_axes((left, bottom / height, 0.985 - left, lane * ranks / height))
        first, count = _window(measured)
        present = draw_lanes(axes, measured, first, count, lane)
        label_nodes(axes, measured, lane, margin=(left - 0.014) / (0.985 - left))
        _mark_steps(axes, measured, first, count)
        lowest = axes
        if ports:
            axes.tick_params(axis="x", labelbottom=False)
            lowest = figure.add_axes((left, 0.68 / height, 0.985 - left, LANE_INCHES * len(ports) / height))
            draw_port_lanes(lowest, measured, first, count, ports)
        lowest.set_xlabel("milliseconds", labelpad=2)
        look.draw_legend(figure, present, 0.42)
        look.footnote(figure, [measured], _clock_error(measured))
    return figure


def _finding(measured: MeasuredRun) -> str:
    cut = parts(measured.figures)
    largest = max(cut, key=cut.get)
    name = {"waiting": "waiting for other ranks", "other": "time in no phase"}.get(largest, largest)
    step_ms = measured.figures["step_ms"]
    return f"{measured.label}: {short_ms(step_ms)} ms a step, the largest part {name} ({cut[largest] / step_ms:.0%})"


def _window(measured: MeasuredRun) -> tuple[int, int]:
    """Index of the first step drawn, and how many: consecutive ones, the representative in the middle if possible."""
    steps = measured.times.steps
    middle = measured.times.representative()
    first = max(0, min(middle - STEPS // 2, len(steps) - STEPS))
    chosen = steps[first : first + STEPS]
    # Steps that are not consecutive (a resumed run, say) may lie minutes apart.
    return (first, len(chosen)) if chosen[-1] - chosen[0] == len(chosen) - 1 else (middle, 1)


def _mark_steps(axes, measured: MeasuredRun, first: int, count: int) -> None:
    times = measured.times
    begin = times.start_ns[first].min()
    for index in range(first, first + count):
        left = (times.start_ns[index].min() - begin) * 1e-6
        axes.axvline(left, color=look.INK, linewidth=0.8)
        axes.annotate(
            f"step {times.steps[index]}", (left, 1), (3, 2), xycoords=("data", "axes fraction"),
            textcoords="offset points", size=8, color=look.FAINT, annotation_clip=False,
        )  # fmt: skip


def _clock_error(measured: MeasuredRun) -> str:
    error_ns = max(trace.clock["error_ns"] for trace in measured.run.ranks)
    return f"clocks aligned to {error_ns * 1e-3:.0f} µs" if error_ns else ""
