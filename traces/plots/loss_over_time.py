"""Plot of validation loss over seconds of training. Who reaches a loss first, and when?"""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from traces.plots import look
from traces.plots.loss_curves import COLOURS
from traces.units import count_text, listed, seconds_text
from traces.verdict.time_to_loss import Curve, Reached, headline, reach, soonest

PANEL_INCHES = 4.3
LETTERS_PER_INCH = 14.5  # of the legend; the coloured line before each label is as wide as five letters
LINE_SHARE = 0.075  # of a panel's height, for a line of text below the curves
WIDE = 10  # the axis of seconds is logarithmic if the slowest run takes more than this many times as long


def draw(panels: dict[str, dict[str, list[Curve]]], target: float, notes=()) -> Figure:
    """Draw a panel for each {label: the curves of its seeds}, all with the same labels.

    Thin lines are seeds, thick lines their mean. Where a label's median reaches the target, a line leads down to its
    seconds.
    """
    found = {name: reach(groups, target) for name, groups in panels.items()}
    labels = [one.label for one in next(iter(found.values()))]
    colours = {label: COLOURS[place % len(COLOURS)] for place, label in enumerate(labels)}
    legend = [Line2D([], [], color=colour, linewidth=2.4, label=label) for label, colour in colours.items()]
    letters = sum(len(label) + 5 for label in labels)
    width = max(9.0, PANEL_INCHES * len(panels), letters / LETTERS_PER_INCH)
    with look.page(width, 3.9, *_finding(found, target), legend, notes) as figure:
        row = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
        for axes, (name, reached) in zip(row, found.items(), strict=True):
            _draw_curves(axes, reached, colours)
            axes.axhline(target, color=look.INK, linewidth=0.8, linestyle=(0, (4, 3)))
            axes.set_title(name, loc="left", size=10)
            axes.set_xlabel("seconds of training")
        row[0].set_ylabel("validation loss (nats per token)")
        style = {"xycoords": ("axes fraction", "data"), "va": "top", "size": 8}
        look.note(row[0], f"loss {target:g}", (0, target), (3, -3), **style)
        _scale(row[0], found)
        _leave_room(row[0], max(sum(one.median_s < np.inf for one in reached) for reached in found.values()))
        for axes, reached in zip(row, found.values(), strict=True):
            _mark(axes, reached, target, colours)
    return figure


def _finding(found: dict[str, list[Reached]], target: float) -> tuple[str, str]:
    """Return the title and the line below it: who is first, in each panel if there are several."""
    seeds = max(len(one.curves) for reached in found.values() for one in reached)
    how = f"{count_text(seeds, 'seed')}: thin lines; their mean: thick lines; their median: seconds. " * (seeds > 1)
    subtitle = f"{how}Seconds of training steps alone"
    if len(found) == 1:
        return headline(*found.values(), target), subtitle
    places = {}
    for name, reached in found.items():
        first = " and ".join(one.label for one in soonest(reached)) or "none"
        places.setdefault(first, []).append(name)
    firsts = "; ".join(f"{first} at {listed(names)}" for first, names in places.items())
    return f"First to loss {target:g}: {firsts}", subtitle


def _draw_curves(axes, found: list[Reached], colours: dict[str, str]) -> None:
    for one in found:
        style = {"color": colours[one.label]}
        for curve in one.curves:
            axes.plot(curve.seconds, curve.losses, **style, linewidth=0.7, alpha=0.5)
        shared = min(len(curve.losses) for curve in one.curves)
        seconds, losses = np.mean([(curve.seconds[:shared], curve.losses[:shared]) for curve in one.curves], axis=0)
        axes.plot(seconds, losses, **style, linewidth=2, marker=".", markersize=4)
    axes.grid(axis="y", color="#E6E6E6", linewidth=0.6)


def _scale(axes, found: dict[str, list[Reached]]) -> None:
    """Choose the axis of seconds, which all panels share."""
    curves = [curve for reached in found.values() for one in reached for curve in one.curves]
    ends = [curve.seconds[-1] for curve in curves if len(curve.seconds)]
    if ends and max(ends) > WIDE * min(ends):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda seconds, _: f"{seconds:g}")
    else:
        axes.set_xlim(0, 1.08 * max(ends, default=1))


def _leave_room(axes, lines: int) -> None:
    """Move the lower end of the axis of losses down, for `lines` lines of text below the curves."""
    low, high = axes.get_ylim()
    axes.set_ylim(high - (high - low) / (1 - LINE_SHARE * lines), high)


def _mark(axes, found: list[Reached], target: float, colours: dict[str, str]) -> None:
    """Lead down from each place where a label reaches the target, to its seconds. The soonest stands lowest."""
    low, high = axes.get_ylim()
    reached = sorted((one for one in found if one.median_s < np.inf), key=lambda one: one.median_s)
    for place, one in enumerate(reached):
        height = low + (place + 0.5) * LINE_SHARE * (high - low)
        axes.plot([one.median_s] * 2, [height, target], color=colours[one.label], linewidth=1, linestyle=":")
        axes.plot(one.median_s, target, "o", color=colours[one.label], markersize=6, markeredgecolor="white")
        text = {"color": colours[one.label], "weight": "bold", "size": 9, "va": "center"}
        look.note(axes, seconds_text(one.median_s), (one.median_s, height), (3, 0), **text)
