"""Plots of several runs beside their expected results.

Scaling: tokens per second against the number of ranks, with a line for perfect scaling from the smallest run; and each
run's POP parallel efficiency, with its losses to load balance, serialization and transfer. Model: each run's measured
exchange time against the prediction of the cost model.
"""

import math
import textwrap

from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

from traces.plots import look
from traces.plots.comparison import UNDER_BAR
from traces.units import count_text
from traces.verdict.summary import TimedRun

LOST = {
    "load_balance": ("load balance", {"facecolor": "#F0E442", "hatch": "...."}),
    "serialization": ("serialization", {"facecolor": look.ORANGE, "hatch": "////"}),
    "transfer": ("transfer", {"facecolor": look.VERMILLION}),
}
COLOURS = (look.BLUE, look.VERMILLION, look.GREEN, look.PURPLE, look.ORANGE, look.INK)
MARKERS = "os^Dv*"
PERFECT = {"color": look.FAINT, "linestyle": (0, (3, 2)), "linewidth": 1}
LEAST_TICK_RATIO = 1.15  # closer rates would have overlapping labels
WITHIN = 0.15


def draw_scaling(measured: list[TimedRun]) -> Figure:
    """Draw runs with two or more different numbers of ranks. Their logs must hold tokens per second."""
    measured = sorted(measured, key=lambda one: (one.figures["ranks"], one.label))
    handles = [Patch(facecolor=look.BLUE, label="useful")]
    handles += [Patch(**style, edgecolor="white", label=f"lost: {text}") for text, style in LOST.values()]
    notes = [*look.facts(measured), look.median_note(measured)]
    width = max(9.4, 4.7 + 0.95 * len(measured))
    smallest = _fastest(measured, measured[0].figures["ranks"])
    largest = _fastest(measured, measured[-1].figures["ranks"])
    size = count_text(largest.figures["ranks"], "rank")
    subtitle = f"{largest.label} on {size}: {largest.diagnosis.finding.headline}"
    several = len({one.run.label for one in measured}) > 1
    title = _speedup(smallest.figures, largest.figures, several)
    with look.page(width, 3.7, title, subtitle, handles, notes) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(4.7, width - 4.7))
        _draw_rates(left, measured, smallest.figures["tokens_per_s"])
        _draw_efficiencies(right, measured, several)
    return figure


def _fastest(measured: list[TimedRun], ranks: int) -> TimedRun:
    alike = [one for one in measured if one.figures["ranks"] == ranks]
    return max(alike, key=lambda one: one.figures["tokens_per_s"])


def _draw_rates(axes, measured: list[TimedRun], first: float) -> None:
    """first: tokens per second where the line for perfect scaling begins."""
    rates = [one.figures["tokens_per_s"] for one in measured]
    ranks = [one.figures["ranks"] for one in measured]
    fewest = ranks[0]
    most = ranks[-1]
    axes.plot([fewest, most], [first, first * most / fewest], **PERFECT)
    look.note(axes, "perfect", (most, first * most / fewest), (-4, 2), ha="right", size=8, color=look.FAINT)
    for place, name in enumerate(dict.fromkeys(one.run.label for one in measured)):
        own = [(r, t) for r, t, one in zip(ranks, rates, measured, strict=True) if one.run.label == name]
        axes.plot(*zip(*own, strict=True), color=COLOURS[place % 6], marker=MARKERS[place % 6], label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(sorted(set(ranks)), [_size(measured, count) for count in sorted(set(ranks))])
    axes.minorticks_off()
    ticks = _apart(sorted(set(rates)))
    axes.set_yticks(ticks, [f"{rate:,.0f}" for rate in ticks], size=7.5)
    axes.set_title("tokens a second", loc="left", size=9)
    axes.legend(frameon=False, fontsize=8, loc="best")


def _apart(rates: list[float]) -> list[float]:
    """Return the rates, out of these ascending ones, whose labels do not overlap."""
    kept = rates[:1]
    for rate in rates[1:]:
        if rate >= LEAST_TICK_RATIO * kept[-1]:
            kept.append(rate)
    return kept


def _draw_efficiencies(axes, measured: list[TimedRun], several: bool) -> None:
    for place, found in enumerate(one.diagnosis.evidence.efficiency for one in measured):
        bottom = found["parallel"]
        axes.bar(place, bottom, 0.66, color=look.BLUE, edgecolor="white")
        axes.text(place, bottom / 2, f"{bottom:.0%}", ha="center", va="center", color="white", size=8)
        for name, (_, style) in LOST.items():
            axes.bar(place, found["lost"][name], 0.66, bottom, **style, edgecolor="white", linewidth=0.5)
            bottom += found["lost"][name]
    axes.set_xticks(range(len(measured)), [_bar_label(one, several) for one in measured], size=7 if several else 9)
    axes.set_ylim(0, 1)
    axes.set_yticks([0, 0.5, 1], ["0", "50 %", "100 %"])
    axes.tick_params(axis="x", length=0)
    axes.set_title("of the ranks' time, by number of ranks", loc="left", size=9)


def _bar_label(one: TimedRun, several: bool) -> str:
    """Return the label under a bar: ranks, the strategy if there are several, MFU if it is known."""
    strategy = [textwrap.fill(one.run.label, UNDER_BAR)] if several else []
    return "\n".join([str(one.figures["ranks"]), *strategy, *look.mfu_lines(one.figures)])


def _size(measured: list[TimedRun], ranks: int) -> str:
    nodes = sorted({one.figures["nodes"] for one in measured if one.figures["ranks"] == ranks})
    return f"{ranks}\n{'/'.join(map(str, nodes))} node{'s' * (nodes != [1])}"


def _speedup(smallest: dict, largest: dict, several: bool) -> str:
    """Compare the fastest runs of the fewest and the most ranks. several: whether there are several strategies."""
    speedup = largest["tokens_per_s"] / smallest["tokens_per_s"]
    text = f"{largest['ranks']} ranks are {speedup:.1f} times as fast as {smallest['ranks']}"
    if several:
        sizes = f"{largest['ranks']} ranks is {speedup:.1f} times as fast as the fastest on {smallest['ranks']}"
        text = f"The fastest run on {sizes}"
    return f"{text}, of {largest['ranks'] / smallest['ranks']:.3g} possible"


def draw_model(points: list[tuple[str, float, float]]) -> Figure:
    """Draw measured against predicted exchanges. points: (label, predicted seconds, measured seconds)."""
    points = [(label, predicted * 1e3, measured * 1e3) for label, predicted, measured in points]
    low = 0.7 * min(min(pair) for _, *pair in points)
    high = 1.5 * max(max(pair) for _, *pair in points)
    with look.page(6.4, 4.7, _largest_miss(points)) as figure:
        axes = figure.subplots()
        ends = [low, high]
        axes.fill_between(ends, [x * (1 - WITHIN) for x in ends], [x * (1 + WITHIN) for x in ends], color=look.BAND)
        axes.plot(ends, ends, color=look.FAINT, lw=0.8)
        for label, predicted, measured in points:
            axes.plot(predicted, measured, "o", color=look.BLUE, ms=6)
            is_far_right = math.log(predicted / low) > 2 / 3 * math.log(high / low)
            offset = (-7, -3) if is_far_right else (7, -3)
            align = "right" if is_far_right else "left"
            look.note(axes, label, (predicted, measured), offset, size=8, ha=align)
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(ScalarFormatter())
            axis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("the model's exchange, ms")
        axes.set_ylabel("measured, ms")
        corner = (high / 1.1, high / 1.1 * (1 - WITHIN))
        axes.text(*corner, f"± {WITHIN:.0%}", ha="right", va="top", size=8, color=look.FAINT)
    return figure


def _largest_miss(points: list[tuple[str, float, float]]) -> str:
    misses = {label: measured / predicted - 1 for label, predicted, measured in points}
    label, off = max(misses.items(), key=lambda item: abs(item[1]))
    if abs(off) <= WITHIN:
        return f"The model is within {max(abs(off), 0.01):.0%} of every measured exchange"
    return f"The model misses {label} most: {'slower' if off > 0 else 'faster'} than it says by {abs(off):.0%}"
