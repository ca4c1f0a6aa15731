"""Shared by all plots: colours with a fixed meaning, the page around a picture, saving.

The colours are by Okabe and Ito, for colour-blind readers. Neighbours in time also differ in lightness, and waiting is
hatched, so figures are readable in greyscale. A page has title, subtitle, legend, picture and footnote. Matplotlib's
constrained layout finds the picture's margins.
"""

import re
from contextlib import contextmanager
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from traces.record.phases import COPY, PIPELINE
from traces.units import count_text, mfu_text, short_count
from traces.verdict.summary import TimedRun

INK = "#222222"
FAINT = "#767676"
BAND = "#F4F4F4"
BLUE = "#0072B2"
SKY = "#56B4E9"
VERMILLION = "#D55E00"
ORANGE = "#E69F00"
GREEN = "#009E73"
PURPLE = "#CC79A7"

# (parts of a step, colour, colour of text on it), in the order of a stack.
GROUPS = (
    (("data",), "#8C8C8C", "white"),
    (("compute", "forward"), SKY, INK),
    (("backward",), BLUE, "white"),
    (COPY, PURPLE, INK),
    (("reduce", "reduce_scatter", "allreduce"), VERMILLION, "white"),
    (("tensor", "lend", "borrow", "norm"), "#A23B00", "white"),
    (PIPELINE, "#F0E442", INK),
    (("compress",), "#9BC53D", INK),
    (("update", "outer"), GREEN, "white"),
    (("bcast", "allgather"), ORANGE, INK),
    (("eval",), "#6B6B6B", "white"),
    (("checkpoint",), "#4D4D4D", "white"),
    (("other",), "#CFCFCF", INK),
    (("wait", "waiting"), "#F0F0F0", INK),
    (("bubble",), "#FFFFFF", INK),
)
COLOUR = {part: colour for names, colour, _ in GROUPS for part in names}
WAITING_STYLE = {"facecolor": COLOUR["waiting"], "edgecolor": "#9A9A9A", "hatch": "//////", "linewidth": 0}
BUBBLE_STYLE = {"facecolor": COLOUR["bubble"], "edgecolor": "#B8B8B8", "hatch": "....", "linewidth": 0.6}

STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "hatch.linewidth": 0.6,
    "svg.hashsalt": "gpt2-mpi",
}


def styled():
    """Return a context manager that sets matplotlib's style for a picture."""
    return matplotlib.rc_context(STYLE)


def stack_order(parts) -> list[tuple[tuple[str, ...], str, str]]:
    """Return the groups that have names in `parts`, with these names only: (names, colour, ink)."""
    present = [(tuple(name for name in names if name in parts), colour, ink) for names, colour, ink in GROUPS]
    return [group for group in present if group[0]]


def legend_handles(parts, between: str = " / ") -> list[Patch]:
    """Return a patch for each group with names in `parts`; `between` joins the names of a group."""
    handles = []
    for names, colour, _ in stack_order(parts):
        if "waiting" in names or "wait" in names:
            handles.append(Patch(**WAITING_STYLE, label="waiting for other ranks"))
        elif "bubble" in names:
            handles.append(Patch(**BUBBLE_STYLE, label="bubble"))
        else:
            handles.append(Patch(facecolor=colour, label=between.join(names)))
    return handles


@contextmanager
def page(width: float, inches: float, title: str, subtitle: str = "", legend=(), notes=()):
    """Open a Figure for a picture of this width, and of `inches` height not counting title, legend and notes.

    title: the finding. legend: handles, drawn in one row. notes: parts of the footnote.
    """
    # Inches from the top
    subtitle_at = 0.40
    legend_at = subtitle_at + 0.24 * bool(subtitle)
    above = legend_at + 0.28 * bool(legend)
    below = 0.28 if notes else 0.06
    height = above + inches + below
    with styled():
        figure = Figure(figsize=(width, height), layout="constrained")
        picture = (0, below / height, 1, inches / height)
        figure.get_layout_engine().set(rect=picture, w_pad=0.09, h_pad=0.05, wspace=0.03, hspace=0.03)
        _write_line(figure, title, 1 - 0.12 / height, 13.0, weight="bold", va="top")
        _write_line(figure, subtitle, 1 - subtitle_at / height, 9.5, color=FAINT, va="top")
        if legend:
            _draw_legend(figure, legend, legend_at)
        _write_line(figure, "  ·  ".join(notes), 0.08 / height, 7.5, color=FAINT)
        yield figure


def _write_line(figure: Figure, text: str, bottom: float, size: float, **style) -> None:
    """Write a line from the left edge, in letters of this size, or smaller ones if it would not fit."""
    width = figure.get_figwidth()
    letter = 0.63 if "weight" in style else 0.55  # mean width of bold and plain letters, relative to their size
    size = min(size, (width - 0.3) * 72 / (letter * max(len(text), 1)))
    figure.text(0.13 / width, bottom, text, size=size, **style)


def _draw_legend(figure: Figure, handles: list, inches: float) -> None:
    """Draw the legend in one row, `inches` below the figure's top, in letters small enough to fit."""
    width, height = figure.get_size_inches()
    # In letters; a patch and its gaps take five.
    length = sum(len(handle.get_label()) + 5 for handle in handles)
    size = min(8.5, 8.5 * 15.2 * width / length)
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0.05 / width, 1 - inches / height), ncols=len(handles),
        frameon=False, handlelength=1.4, handletextpad=0.5, columnspacing=1.3, fontsize=size, borderpad=0.2,
    )  # fmt: skip


def note(axes, text: str, at: tuple, points: tuple[float, float], **style):
    """Write text at a distance in `points` from a place, also outside the axes. style: as for axes.annotate."""
    return axes.annotate(text, at, points, textcoords="offset points", annotation_clip=False, **style)


def draw_colours(axes, image, unit: str) -> None:
    """Draw the colour scale right of the image."""
    bar = axes.figure.colorbar(image, cax=axes.inset_axes((1.015, 0, 0.016, 1)))
    bar.outline.set_visible(False)
    bar.ax.set_title(unit, size=8, loc="left", pad=4)
    bar.ax.tick_params(labelsize=7, length=2)


def median_note(measured: list[TimedRun]) -> str:
    """Return a note for the footnote: over how many rounds and steps medians or means were taken."""
    texts = []
    for figures in (one.figures for one in measured):
        average = "median" if figures["exchange_period"] == 1 else "mean"
        steps = count_text(figures["steps"], "step")
        texts.append(f"{average} of {steps} after {figures['warm_up_dropped']} of warm-up")
    rounds = max(len(one.figures.get("rounds", [])) for one in measured)
    of_rounds = f"median of {count_text(rounds, 'round')} in turns (circles), each of them the " if rounds else ""
    return of_rounds + " or ".join(dict.fromkeys(texts))


def mfu_lines(figures: dict) -> list[str]:
    """Return a run's MFU in short lines, none if it is unknown."""
    if figures["mfu"] is None:
        return []
    return f"MFU {mfu_text(figures['mfu'], figures['peak_underestimated'])}".replace(" (", "\n(").split("\n")


def facts(measured: list[TimedRun]) -> list[str]:
    """Return notes for the footnote: ranks, nodes, MPI library and parameters; each value once if runs differ."""
    configs = [one.run.config for one in measured]
    sizes = [(one.figures["ranks"], one.figures["nodes"]) for one in measured]
    found = [
        [f"{count_text(ranks, 'rank')} on {count_text(nodes, 'node')}" for ranks, nodes in sizes],
        [short_library(config["mpi_library"]) for config in configs if "mpi_library" in config],
        [f"{short_count(config['parameters'])} parameters" for config in configs if "parameters" in config],
    ]
    return [" or ".join(dict.fromkeys(values)) for values in found if values]


def short_library(text: str) -> str:
    """Return name and version from MPI's version string: "MPICH 5.0.1", "Open MPI 5.0.8"."""
    line = text.strip().splitlines()[0] if text.strip() else "unknown MPI"
    match = re.match(r"(.*?)(?: version:?\s*| v)(\d[\w.]*)", line, re.IGNORECASE)
    return " ".join(match.groups()) if match else line[:40]


def save(figure: Figure, stem) -> list[Path]:
    """Write stem.png (150 dpi) and stem.svg, and return the paths. Make the folder."""
    paths = [Path(f"{stem}.{kind}") for kind in ("png", "svg")]
    paths[0].parent.mkdir(parents=True, exist_ok=True)
    with styled():
        figure.savefig(paths[0], dpi=150, facecolor="white")
        # Without a date, the same run gives the same file.
        figure.savefig(paths[1], facecolor="white", metadata={"Date": None})
    return paths
