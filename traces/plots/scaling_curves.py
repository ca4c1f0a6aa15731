"""Plot: several runs of growing size. How much faster does it get, and what eats the rest?

Left, tokens per second against ranks, with the line of perfect scaling from the smallest run; right, POP's parallel
efficiency of each run and what is lost to load balance, serialization and transfer: parts of one whole.
"""

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from traces.plots import look
from traces.read.analysis import MeasuredRun
from traces.read.efficiency import Efficiency, efficiency
from traces.read.replay import ideal_runtimes
from traces.verdict.ranking import mfu_text

LOST = (
    ("load_balance", "load balance", "#F0E442", "...."),
    ("serialization", "serialization", look.ORANGE, "////"),
    ("transfer", "transfer", look.VERMILLION, ""),
)
MARKERS = "os^Dv*"


def draw(measured: list[MeasuredRun]) -> Figure:
    """Runs of one strategy or several, at two or more numbers of ranks; their logs must hold tokens per second."""
    measured = sorted(measured, key=lambda one: (one.figures["ranks"], one.label))
    found = [efficiency(one.run, one.times, ideal_runtimes(one.run, one.times)) for one in measured]
    with look.styled():
        figure = Figure(figsize=(9.4, 4.2))
        look.headline(figure, _finding(measured, found))
        _draw_rates(figure.add_axes((0.085, 0.16, 0.37, 0.66)), measured)
        _draw_efficiencies(figure.add_axes((0.555, 0.16, 0.43, 0.66)), measured, found)
        handles = [Patch(facecolor=look.BLUE, label="useful")]
        handles += [Patch(facecolor=c, hatch=h, edgecolor="white", label=f"lost: {text}") for _, text, c, h in LOST]
        figure.legend(
            handles=handles, loc="upper right", bbox_to_anchor=(0.99, 0.9), ncols=4, frameon=False, fontsize=8,
            handlelength=1.3, columnspacing=1.2, handletextpad=0.4,
        )  # fmt: skip
        look.footnote(figure, measured, look.median_note(measured))
    return figure


def _draw_rates(axes, measured: list[MeasuredRun]) -> None:
    rates = [one.figures["tokens_per_s"] for one in measured]
    ranks = [one.figures["ranks"] for one in measured]
    first = min(range(len(ranks)), key=lambda index: (ranks[index], -rates[index]))
    axes.plot(
        [min(ranks), max(ranks)], [rates[first], rates[first] * max(ranks) / min(ranks)], color=look.FAINT,
        ls=(0, (3, 2)), lw=1,
    )  # fmt: skip
    axes.annotate("perfect", (max(ranks), rates[first] * max(ranks) / min(ranks)), (-4, 2), ha="right", size=8,
                  textcoords="offset points", color=look.FAINT)  # fmt: skip
    colours = (look.BLUE, look.VERMILLION, look.GREEN, look.PURPLE, look.ORANGE, look.INK)
    for place, name in enumerate(dict.fromkeys(one.run.label for one in measured)):
        own = [(r, t) for r, t, one in zip(ranks, rates, measured, strict=True) if one.run.label == name]
        axes.plot(*zip(*own, strict=True), color=colours[place % 6], marker=MARKERS[place % 6], label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(sorted(set(ranks)), [_size(measured, count) for count in sorted(set(ranks))])
    axes.minorticks_off()
    axes.set_yticks(sorted(set(rates)), [f"{rate:,.0f}" for rate in sorted(set(rates))], size=7.5)
    axes.set_title("tokens a second", loc="left", size=9)
    axes.legend(frameon=False, fontsize=8, loc="upper left")


def _draw_efficiencies(axes, measured: list[MeasuredRun], found: list[Efficiency]) -> None:
    for place, one in enumerate(found):
        axes.bar(place, one.parallel, 0.66, color=look.BLUE, edgecolor="white")
        axes.text(place, one.parallel / 2, f"{one.parallel:.0%}", ha="center", va="center", color="white", size=8)
        bottom = one.parallel
        for name, _, colour, hatch in LOST:
            axes.bar(place, one.lost[name], 0.66, bottom, color=colour, hatch=hatch, edgecolor="white", linewidth=0.5)
            bottom += one.lost[name]
    several = len({one.run.label for one in measured}) > 1
    axes.set_xticks(range(len(found)), [_bar_label(one, several) for one in measured], size=7.5 if several else 9)
    axes.set_ylim(0, 1)
    axes.set_yticks([0, 0.5, 1], ["0", "50 %", "100 %"])
    axes.tick_params(axis="x", length=0)
    axes.set_title("of the ranks' time, by number of ranks", loc="left", size=9, pad=22)


def _bar_label(one: MeasuredRun, several: bool) -> str:
    """Under a bar: ranks, the strategy where there are several, MFU where it is known."""
    mfu = one.figures["mfu"]
    lines = [str(one.figures["ranks"]), one.run.label if several else "", "" if mfu is None else f"MFU {mfu_text(mfu)}"]
    return "\n".join(filter(None, lines))


def _size(measured: list[MeasuredRun], ranks: int) -> str:
    nodes = sorted({one.figures["nodes"] for one in measured if one.figures["ranks"] == ranks})
    return f"{ranks}\n{'/'.join(map(str, nodes))} node{'s' * (nodes != [1])}"


def _finding(measured: list[MeasuredRun], found: list[Efficiency]) -> str:
    smallest, largest = measured[0], measured[-1]
    speedup = largest.figures["tokens_per_s"] / smallest.figures["tokens_per_s"]
    more = largest.figures["ranks"] / smallest.figures["ranks"]
    worst = max(LOST, key=lambda row: found[-1].lost[row[0]])
    text = f"{largest.figures['ranks']} ranks are {speedup:.1f} times as fast as {smallest.figures['ranks']}"
    return f"{text}, of {more:.3g} possible; most is lost to {worst[1]} ({found[-1].lost[worst[0]]:.0%})"
