"""Part of make_docs.py: what bfloat16 on the wire does to the loss, beside what another order of additions does."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from scripts.makers.pages.page import FIGURES, Part, compare, log_of, measured_on
from traces.plots import look
from traces.plots.loss_curves import smooth

# What --strategy takes: its label, colour and dashes. The last one adds in another order: float32's own rounding.
RUNS = {
    "ring": ("float32", "#000000", "-"),
    "ring/bfloat16": ("bfloat16", look.VERMILLION, (0, (5, 2))),
    "ring/bfloat16/error-feedback": ("bfloat16, error feedback", look.BLUE, (0, (1, 1.5))),
    "tree": ("float32, added in another order", "#A6A6A6", "-"),
}


def wire(part: Part, folder: Path) -> str:
    """The same training with each, and a figure of the losses."""
    runs, _ = compare(folder, part.ranks, ",".join(RUNS), part.training)
    losses = {name: np.array([line["loss"] for line in log_of(run)]) for name, run in runs.items()}
    apart = {name: np.abs(loss - losses["ring"]) for name, loss in losses.items()}
    means, distances = ({name: found[name][-part.last :].mean() for name in RUNS} for found in (losses, apart))
    rows = [{"label": RUNS[name][0], "mean": means[name], "distance": f"{distances[name]:.1e}"} for name in RUNS]
    rows[0]["distance"] = "-"
    moved = max(abs(mean / means["ring"] - 1) for mean in means.values())
    _, plain, fed_back, _ = distances.values()
    with look.styled():
        figure = draw(losses, apart)
        look.headline(
            figure,
            f"Half the bytes, the mean loss within {moved:.2%}; "
            f"error feedback keeps it {plain / fed_back:.0f} times nearer",
            f"{part.ranks} ranks in a ring, rounded at every hop; right: running mean of the distance at each step",
        )
        figure.savefig(FIGURES / "wire.png", dpi=150)
    return part.filled(rows, measured_on=measured_on(runs["ring"]))


def draw(losses: dict[str, np.ndarray], apart: dict[str, np.ndarray]) -> Figure:
    """Loss of each run on the left; on the right its distance from float32's, as a running mean."""
    figure = Figure(figsize=(9, 3.6))
    left, right = figure.add_axes((0.07, 0.14, 0.40, 0.66)), figure.add_axes((0.57, 0.14, 0.41, 0.66))
    left.set_ylabel("training loss (nats per token)")
    right.set_ylabel("distance from float32's loss")
    for name, (label, colour, dashes) in RUNS.items():
        steps = np.arange(1, len(losses[name]) + 1)
        if name != "tree":  # it would lie on float32's curve
            left.plot(steps, losses[name], color=colour, linestyle=dashes, linewidth=1.3, label=label)
        if name != "ring":
            right.semilogy(steps, smooth(apart[name], len(steps) // 15), color=colour, linewidth=1.6, label=label)
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.grid(axis="y", color="#E6E6E6", linewidth=0.6)
        axes.legend(frameon=False, fontsize=8)
    return figure
