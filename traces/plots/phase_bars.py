"""Plot: one stacked bar per run, the median milliseconds of each phase. Where does a step's time go?"""

from matplotlib.figure import Figure

from traces.plots import look
from traces.read.analysis import MeasuredRun, parts
from traces.verdict.ranking import mfu_text, short_ms, verdict

BAR = 0.62
HEIGHT = 4.6


def draw(measured: list[MeasuredRun]) -> Figure:
    """One bar per run, in the given order; waiting for other ranks hatched on top of the stack."""
    cuts = [parts(one.figures) for one in measured]
    top = max(sum(cut.values()) for cut in cuts)
    with look.styled():
        width = min(9.0, max(6.4, 3.6 + 1.5 * len(measured)))
        figure = Figure(figsize=(width, HEIGHT))
        sentence = verdict([one.figures for one in measured])
        # The sentence about a single run starts with a strategy's name.
        look.headline(figure, sentence if len(measured) == 1 else sentence[0].upper() + sentence[1:])
        axes = figure.add_axes((0.66 / width, 0.155, 1 - 2.81 / width, 0.74))
        for place, (one, cut) in enumerate(zip(measured, cuts, strict=True)):
            _draw_bar(axes, place, cut, top)
            _write_total(axes, place, one, sum(cut.values()))
        axes.set_xticks(range(len(measured)), [one.label.replace(" ", "\n") for one in measured])
        axes.set_xlim(-0.6, len(measured) - 0.4)
        axes.set_ylim(0, top * 1.16)
        axes.set_ylabel("milliseconds a step")
        axes.tick_params(axis="x", length=0)
        present = {name for cut in cuts for name in cut}
        axes.legend(
            handles=look.legend_handles(present, " /\n"), reverse=True, loc="center left", bbox_to_anchor=(1.02, 0.5),
            frameon=False, handlelength=1.2, labelspacing=0.8,
        )  # fmt: skip
        look.footnote(figure, measured, look.median_note(measured))
    return figure


def _draw_bar(axes, place: int, cut: dict[str, float], top: float) -> None:
    bottom = 0.0
    for names, _, ink in look.stack_order(cut):
        height = sum(cut[name] for name in names)
        waiting = "waiting" in names
        axes.bar(place, height, BAR, bottom, **look.bar_style(names[0], height < 0.02 * top))
        if height > 0.045 * top:
            box = {"facecolor": look.COLOUR["waiting"], "edgecolor": "none", "pad": 1.2} if waiting else None
            axes.text(
                place, bottom + height / 2, short_ms(height), ha="center", va="center", size=8, color=ink, bbox=box
            )
        bottom += height


def _write_total(axes, place: int, one: MeasuredRun, height: float) -> None:
    rate, mfu = one.figures["tokens_per_s"], one.figures["mfu"]
    below = [] if rate is None else [f"{rate:,.0f} tokens/s"]
    below += [] if mfu is None else [f"MFU {mfu_text(mfu)}"]
    style = {"textcoords": "offset points", "ha": "center"}
    axes.annotate("\n".join(below), (place, height), (0, 4), **style, size=8, color=look.FAINT)
    total = f"{short_ms(one.figures['step_ms'])} ms"
    axes.annotate(total, (place, height), (0, 4 + 11 * len(below)), **style, size=10, weight="bold")
