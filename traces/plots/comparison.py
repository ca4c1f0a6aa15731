"""Plots of where a step's time goes, in one run or several side by side. Which run is fastest, and why?

Phases: a stacked bar for each run, with the median milliseconds of each phase. Comparison: horizontal bars, and below
them one representative step of each run on the same time axis.
"""

import textwrap

from matplotlib.figure import Figure

from traces.plots import look
from traces.plots.lanes import draw_lanes, label_lanes, lane_height, lanes_of
from traces.units import short_ms
from traces.verdict.ranking import fastest, from_slow_to_fast, grounds, slowness, speed_text, verdict
from traces.verdict.summary import TimedRun, parts
from traces.verdict.titles import title_lines

LABEL_CHARACTERS = 22  # left of a horizontal bar
UNDER_BAR = 14  # characters of a line under a bar
BAR_INCHES = 0.34
GAP_INCHES = 0.30
# A run with rounds has a taller row: a thinner bar, and below the bar a line with a circle for each round.
ROW_INCHES = 0.46
BAR_HEIGHT = 0.54
BAR_RISE = 0.14
ROUNDS_FALL = 0.28
# Parts of a bar get no number, or no edge, if they are shorter than these fractions of the longest bar.
NUMBERED = 0.045
EDGED = 0.02


def draw_phases(measured: list[TimedRun]) -> Figure:
    """Draw a bar for each run, in the given order, with waiting hatched at its top."""
    cuts = [parts(one.figures) for one in measured]
    top = max(sum(cut.values()) for cut in cuts)
    (first, *others) = measured
    facts = speed_text(first.figures, [first.figures]), "the parts are a mean rank's"
    title = _finding(measured) if others else title_lines(first, "phases", *facts)
    # The headline of a single run is longer than the sentence about several.
    width = 8.0 if len(measured) == 1 else min(12.0, max(6.4, 3.6 + 1.5 * len(measured)))
    notes = [*look.facts(measured), look.median_note(measured)]
    with look.page(width, 3.9, *title, notes=notes) as figure:
        axes = figure.subplots()
        for place, (one, cut) in enumerate(zip(measured, cuts, strict=True)):
            _stack(axes, place, 0.62, cut, top)
            _write_speed(axes, place, one, sum(cut.values()))
        axes.set_xticks(range(len(measured)), [textwrap.fill(one.label, UNDER_BAR) for one in measured])
        beside = 1.0 if len(measured) == 1 else 0.6
        axes.set_xlim(-beside, len(measured) - 1 + beside)
        axes.set_ylim(0, top * 1.16)
        axes.set_ylabel("milliseconds a step")
        axes.tick_params(axis="x", length=0)
        axes.legend(
            handles=look.legend_handles({name for cut in cuts for name in cut}, " /\n"), reverse=True,
            loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False, handlelength=1.2, labelspacing=0.8,
        )  # fmt: skip
    return figure


def _finding(measured: list[TimedRun]) -> tuple[str, str]:
    """Return title and subtitle for several runs: the fastest, and why. Each run's verdict is above its timeline."""
    runs = [one.figures for one in measured]
    sentence = verdict(runs)
    return sentence[0].upper() + sentence[1:], grounds(runs)


def _stack(axes, place: float, width: float, cut: dict[str, float], longest: float, is_flat=False) -> float:
    """Draw a run's parts end to end, each with its milliseconds, upwards or, if is_flat, to the right.

    Return where they end.
    """
    draw_bar = axes.barh if is_flat else axes.bar
    at = 0.0
    for names, colour, ink in look.stack_order(cut):
        ms = sum(cut[name] for name in names)
        is_waiting = "waiting" in names
        plain = {"facecolor": colour, "edgecolor": "white", "linewidth": 0.8 if ms >= EDGED * longest else 0}
        draw_bar(place, ms, width, at, **(look.WAITING_STYLE if is_waiting else plain))
        if ms > NUMBERED * longest:
            # Numbers on hatching need a plain background.
            box = {"facecolor": colour, "edgecolor": "none", "pad": 1.2} if is_waiting else None
            middle = (at + ms / 2, place) if is_flat else (place, at + ms / 2)
            axes.text(*middle, short_ms(ms), ha="center", va="center", size=8, color=ink, bbox=box)
        at += ms
    return at


def _write_speed(axes, place: int, one: TimedRun, height: float) -> None:
    rate = one.figures["tokens_per_s"]
    below = ([] if rate is None else [f"{rate:,.0f} tokens/s"]) + look.mfu_lines(one.figures)
    look.note(axes, "\n".join(below), (place, height), (0, 4), ha="center", size=8, color=look.FAINT)
    total = f"{short_ms(one.figures['step_ms'])} ms"
    look.note(axes, total, (place, height), (0, 4 + 11 * len(below)), ha="center", size=10, weight="bold")


def draw_comparison(measured: list[TimedRun]) -> Figure:
    """Draw all runs, the slowest first, bars and timelines on the same time axis."""
    ranked = [figures["label"] for figures in from_slow_to_fast([one.figures for one in measured])]
    # Runs that exchange nothing come last: they are a yardstick for the others.
    measured = sorted(measured, key=lambda one: ranked.index(one.label) if one.label in ranked else len(ranked))
    # Ranks that exchange nothing drift apart, so their steps have no common time axis.
    stepped = [one for one in measured if one.figures["exchanges"]] or measured
    cuts = [parts(one.figures) for one in measured]
    lanes = [lanes_of(one, one.times.representative(), 1) for one in stepped]
    rounds_ms = [ms for one in measured for ms in _rounds_ms(one.figures)]
    limit = max([sum(cut.values()) for cut in cuts] + [one.length for one in lanes] + rounds_ms)
    lane = [lane_height(len(one.run.ranks), 1.3) for one in stepped]
    heights = [(ROW_INCHES if rounds_ms else BAR_INCHES) * len(measured)]
    heights += [inches * len(one.run.ranks) for inches, one in zip(lane, stepped, strict=True)]
    handles = look.legend_handles({name for cut in cuts for name in cut})
    notes = [*look.facts(measured), look.median_note(measured)]
    inches = sum(heights) + GAP_INCHES * len(lanes) + 0.5
    with look.page(9, inches, *_finding(measured), handles, notes) as figure:
        top, *panels = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
        _draw_bars(top, measured, cuts, limit)
        for axes, one, steps, height in zip(panels, stepped, lanes, lane, strict=True):
            draw_lanes(axes, steps, len(one.run.ranks), height)
            label_lanes(axes, one, height)
            number = one.times.steps[one.times.representative()]
            axes.set_title(f"{one.label}, step {number}: {one.diagnosis.finding.headline}", loc="left", size=9, pad=3)
            axes.tick_params(axis="x", length=0)
            axes.spines["bottom"].set_visible(False)
        # The time axis, once for all lanes.
        panels[-1].tick_params(axis="x", length=3)
        panels[-1].spines["bottom"].set_visible(True)
        panels[-1].set_xlabel("milliseconds since the start of the step", labelpad=2)
        panels[-1].set_xlim(0, limit)
    return figure


def _draw_bars(axes, measured: list[TimedRun], cuts: list[dict[str, float]], limit: float) -> None:
    runs = [one.figures for one in measured]
    ranked = from_slow_to_fast(runs)
    best = fastest(runs) if ranked else []
    weights = ["bold" if figures in best else "normal" for figures in runs]
    for place, (figures, cut, weight) in enumerate(zip(runs, cuts, weights, strict=True)):
        rounds_ms = _rounds_ms(figures)
        rise = BAR_RISE if rounds_ms else 0.0
        height = BAR_HEIGHT if rounds_ms else 0.74
        end = _stack(axes, place - rise, height, cut, limit, is_flat=True)
        if rounds_ms:
            _draw_rounds(axes, place + ROUNDS_FALL, rounds_ms)
        text = _speed_text(figures, ranked, runs)
        look.note(axes, text, (max([end, *rounds_ms]), place), (7, 0), va="center", size=10, weight=weight)
    axes.set_ylim(len(measured) - 0.5, -0.5)
    axes.set_yticks(range(len(measured)), [_bar_label(figures) for figures in runs], size=10)
    for label, weight in zip(axes.get_yticklabels(), weights, strict=True):
        label.set_weight(weight)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _rounds_ms(figures: dict) -> list[float]:
    return [one["step_ms"] for one in figures.get("rounds", [])]


def _draw_rounds(axes, place: float, rounds_ms: list[float]) -> None:
    """Draw a circle for each round, on a line from fastest to slowest: the lines show which runs overlap."""
    axes.plot([min(rounds_ms), max(rounds_ms)], [place] * 2, color=look.INK, linewidth=1.2, clip_on=False)
    style = {"markersize": 4.5, "markerfacecolor": "white", "markeredgecolor": look.INK}
    axes.plot(rounds_ms, [place] * len(rounds_ms), "o", clip_on=False, zorder=3, **style)


def _bar_label(figures: dict) -> str:
    """Return the label left of a bar, in lines that fit."""
    label = figures["label"] if figures["exchanges"] else f"{figures['label']} (no exchange)"
    return textwrap.fill(label, LABEL_CHARACTERS, break_on_hyphens=False)


def _speed_text(figures: dict, ranked: list[dict], runs: list[dict]) -> str:
    """Return the run's speed and its ratio to the slowest run's. Leave out the ratio in a tie: it may be noise."""
    text = speed_text(figures, runs).removesuffix(" a step")
    is_proven = figures in ranked and (figures not in (best := fastest(runs)) or len(best) == 1)
    ratio = slowness(ranked[0], runs) / slowness(figures, runs) if is_proven else 1.0
    return f"{text}   {ratio:.1f}\N{MULTIPLICATION SIGN}" if ratio >= 1.05 else text
