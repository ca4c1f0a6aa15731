"""Plot: several strategies in one picture. Which is fastest, and why?

Above, one bar per run with the medians of its phases; below, one representative step of each on the same time axis.
"""

import textwrap

from matplotlib.figure import Figure

from traces.plots import look
from traces.plots.lanes import draw_lanes, label_nodes, lane_height
from traces.read.analysis import MeasuredRun, parts
from traces.verdict.ranking import CONTROL, from_slow_to_fast, ratio_text, same_batch, short_ms, slowness, speed_text

WIDTH = 9.0
LEFT = 0.205
LABEL_CHARACTERS = 22  # bold, left of LEFT
TOP = 1.02
BAR_INCHES = 0.34
GAP_INCHES = 0.30


def draw(measured: list[MeasuredRun]) -> Figure:
    """All runs, the slowest first, bars and timelines from the same zero."""
    measured = _sorted(measured)
    # Without exchanges nothing holds the ranks together: a step of the control has no common time axis.
    stepped = [one for one in measured if one.figures["strategy"] != CONTROL] or measured
    cuts = [parts(one.figures) for one in measured]
    lanes = [lane_height(len(one.run.ranks), 1.3) * len(one.run.ranks) for one in stepped]
    bars = BAR_INCHES * len(measured)
    height = TOP + bars + 0.42 + sum(lanes) + GAP_INCHES * (len(lanes) - 1) + 0.62
    limit = max([sum(cut.values()) for cut in cuts] + [_extent_ms(one) for one in stepped])
    width = (0.875 if same_batch([one.figures for one in measured]) else 0.80) - LEFT
    with look.styled():
        figure = Figure(figsize=(WIDTH, height))
        look.headline(figure, *_finding(measured))
        axes = figure.add_axes((LEFT, 1 - (TOP + bars) / height, width, bars / height))
        _draw_bars(axes, measured, cuts, limit)
        above = TOP + bars + 0.42
        for one, inches in zip(stepped, lanes, strict=True):
            axes = figure.add_axes((LEFT, 1 - (above + inches) / height, width, inches / height))
            _draw_step(axes, one, inches, limit)
            above += inches + GAP_INCHES
        _label_time(axes)
        look.draw_legend(figure, {name for cut in cuts for name in cut}, 0.64)
        look.footnote(figure, measured, look.median_note(measured))
    return figure


def _sorted(measured: list[MeasuredRun]) -> list[MeasuredRun]:
    """The slowest first; the control that exchanges nothing, a yardstick, last."""
    runs = [one.figures for one in measured]
    order = [figures["label"] for figures in from_slow_to_fast(runs)]
    return sorted(measured, key=lambda one: order.index(one.label) if one.label in order else len(order))


def _extent_ms(one: MeasuredRun) -> float:
    """From the first rank's start to the last rank's end of the representative step."""
    index = one.times.representative()
    return float(one.times.end_ns[index].max() - one.times.start_ns[index].min()) * 1e-6


def _draw_bars(axes, measured: list[MeasuredRun], cuts: list[dict[str, float]], limit: float) -> None:
    runs = [one.figures for one in measured]
    ranked = from_slow_to_fast(runs)
    for place, (one, cut) in enumerate(zip(measured, cuts, strict=True)):
        left = 0.0
        for names, _, ink in look.stack_order(cut):
            width = sum(cut[name] for name in names)
            waiting = "waiting" in names
            axes.barh(place, width, 0.74, left, **look.bar_style(names[0], width < 0.02 * limit))
            if width > 0.05 * limit:
                box = {"facecolor": look.COLOUR["waiting"], "edgecolor": "none", "pad": 1} if waiting else None
                axes.text(
                    left + width / 2, place, short_ms(width), ha="center", va="center", size=8, color=ink, bbox=box
                )
            left += width
        _write_total(axes, place, left, one.figures, ranked, runs)
    axes.set_xlim(0, limit)
    axes.set_ylim(len(measured) - 0.5, -0.5)
    axes.set_yticks(range(len(measured)), [_bar_label(one) for one in measured], size=10)
    for label, one in zip(axes.get_yticklabels(), measured, strict=True):
        label.set_weight("bold" if ranked and one.figures is ranked[-1] else "normal")
    axes.tick_params(length=0)
    axes.set_xticks([])
    axes.spines[:].set_visible(False)


def _bar_label(one: MeasuredRun) -> str:
    """What stands left of a bar, in lines that fit there."""
    label = f"{one.label} (no exchange)" if one.figures["strategy"] == CONTROL else one.label
    return textwrap.fill(label, LABEL_CHARACTERS, break_on_hyphens=False)


def _write_total(axes, place: int, end: float, figures: dict, ranked: list[dict], runs: list[dict]) -> None:
    """The run's speed at the bar's end, and how many times the slowest run's speed that is."""
    is_fastest = bool(ranked) and figures is ranked[-1]
    text = speed_text(figures, runs).removesuffix(" a step")
    ratio = slowness(ranked[0], runs) / slowness(figures, runs) if figures in ranked else 1.0
    if ratio >= 1.05:
        text += f"   {ratio:.1f}\N{MULTIPLICATION SIGN}"
    axes.annotate(
        text, (end, place), (5, 0), textcoords="offset points", va="center", size=10,
        weight="bold" if is_fastest else "normal", annotation_clip=False,
    )  # fmt: skip


def _draw_step(axes, one: MeasuredRun, inches: float, limit: float) -> None:
    index = one.times.representative()
    lane = inches / len(one.run.ranks)
    draw_lanes(axes, one, index, 1, lane)
    label_nodes(axes, one, lane, margin=0.12, hosts=False)
    axes.set_xlim(0, limit)
    axes.set_title(f"{one.label}: step {one.times.steps[index]}, rank by rank", loc="left", size=9, pad=3)
    axes.tick_params(axis="x", labelbottom=False, length=0)
    axes.spines["bottom"].set_visible(False)


def _label_time(axes) -> None:
    """The time axis, once for all lanes."""
    axes.tick_params(axis="x", labelbottom=True, length=3)
    axes.spines["bottom"].set_visible(True)
    axes.set_xlabel("milliseconds since the start of the step", labelpad=2)


def _finding(measured: list[MeasuredRun]) -> tuple[str, str]:
    runs = [one.figures for one in measured]
    ranked = from_slow_to_fast(runs)
    if len(ranked) < 2:
        return f"{measured[0].label}: {speed_text(runs[0], runs)}", ""
    slowest, fastest = ranked[0], ranked[-1]
    ratio = slowness(slowest, runs) / slowness(fastest, runs)
    title = f"{fastest['label']} is fastest: {speed_text(fastest, runs)}, {ratio_text(ratio)} than {slowest['label']}"
    return title, _reason(slowest, fastest)


def _reason(slowest: dict, fastest: dict) -> str:
    """What the two spend on exchange, which is where strategies differ."""
    slow, fast = (figures["exchange_share"] * figures["step_ms"] for figures in (slowest, fastest))
    return (
        f"Exchanging gradients and parameters takes {short_ms(fast)} ms of its step; "
        f"{short_ms(slow)} ms with {slowest['label']}"
    )
