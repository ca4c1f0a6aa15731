"""Parts of make_docs.py: training on this machine's cores, its time, its memory, its checkpoints and its loss."""

import shutil
from pathlib import Path
from statistics import fmean, median

import numpy as np
from matplotlib.figure import Figure

from gpt2.config import PRESETS
from gpt2.parameters import Layout
from scripts.makers.pages.page import FIGURES, Part, compare, log_of, measured_on, read
from traces.plots import look
from traces.plots.loss_curves import smooth

# Strategy in the part `wire`: its label, colour and dashes. `tree` adds in another order than `ring`: how far it
# is from the ring is what float32's own rounding does.
WIRES = {
    "ring": ("float32", "#000000", "-"),
    "ring/bfloat16": ("bfloat16", look.VERMILLION, (0, (5, 2))),
    "ring/bfloat16/error-feedback": ("bfloat16, error feedback", look.BLUE, (0, (1, 1.5))),
    "tree": ("float32, added in another order", "#A6A6A6", "-"),
}


def learning(part: Part, folder: Path) -> str:
    """A preset whole, on two ranks."""
    runs, _ = compare(folder, 2, "reduce-scatter", f"{part.training} {part.options.text}")
    shutil.copy(folder / "plots" / "loss.png", FIGURES / "learning.png")
    (run,) = runs.values()
    log = log_of(run)
    return part.filled(
        val_loss=log[-1]["val_loss"],
        train_loss=fmean(line["loss"] for line in log[-200:]),
        minutes=sum(line["step_s"] for line in log) / 60,
        measured_on=measured_on(run),
    )


def sharding(part: Part, folder: Path) -> str:
    """What a rank holds where its state is sharded, beside ZeRO's formula."""
    rows = []
    for model, count in part.runs:
        runs, _ = compare(folder / f"{model}-{count}", count, part.strategies, f"--model {model} {part.training}")
        for name, run in runs.items():
            formula, buffers = (4e-9 * elements for elements in held(name, Layout(PRESETS[model]), count))
            row = {"model": model, "count": count, "name": name, "formula": formula, "with_buffers": formula + buffers}
            rows.append(row | {"peak": max(read(run / "summary.json")["peak_memory_bytes"]) / 1e9})
    return part.filled(rows, measured_on=measured_on(run))


def held(strategy: str, layout: Layout, ranks: int) -> tuple[float, float]:
    """float32 values that a rank of one node holds: parameters, gradients and moments; and those of its buffers."""
    embeddings, layer, *_, last = (stop - start for start, stop in layout.ranges)
    whole, part, room = layout.size, layout.size / ranks, embeddings + 2 * layer + last
    return {
        "reduce-scatter": (2 * whole + 2 * part, part),  # the sum of its block
        "hierarchical-sharded": (2 * whole + 2 * part, whole - part),  # what it adds of its neighbours' gradients
        "zero-2": (whole + 3 * part, room),
        "zero-3": (4 * part, 2 * room),
    }[strategy]


def checkpoint(part: Part, folder: Path) -> str:
    """What a checkpoint costs, beside a run without."""
    rows = []
    for count, name in part.runs:
        without, run = (folder / f"{count}-{name}-{which}" / name for which in ("without", "with"))
        compare(without.parent, count, name, part.training)
        compare(run.parent, count, name, f"{part.training} --checkpoint-every {part.every} --keep 1")
        rows.append({"name": name, "count": count} | checkpoint_costs(without, run, part.every))
        shutil.rmtree(run / "checkpoints")  # gigabytes
    return part.filled(rows, measured_on=measured_on(run))


def checkpoint_costs(without: Path, run: Path, every: int) -> dict:
    """Seconds and megabytes of the rank for which a checkpoint takes longest, of runs without and with them."""
    logs = [log_of(one) for one in (without, run)]
    # The checkpoint after the last step slows no step down.
    by_rank = [
        [cost for cost in costs if cost["step"] < len(logs[1])] for costs in read(run / "summary.json")["checkpoints"]
    ]
    stopped_s, writing_s = (
        max(median(cost[key] for cost in costs) for costs in by_rank) for key in ("stopped_s", "writing_s")
    )
    plain_s, loaded_s = (fmean(line["step_s"] for line in log[every:]) for log in logs)
    return {
        "megabytes": max(cost["bytes"] for costs in by_rank for cost in costs) / 1e6,
        "stopped_s": stopped_s,
        "writing_s": writing_s,
        "plain_s": plain_s,
        "adds_s": stopped_s + every * (loaded_s - plain_s),
    }


def wire(part: Part, folder: Path) -> str:
    """The same training with each, and a figure of the losses."""
    runs, _ = compare(folder, part.ranks, ",".join(WIRES), part.training)
    losses = {name: np.array([line["loss"] for line in log_of(run)]) for name, run in runs.items()}
    apart = {name: np.abs(loss - losses["ring"]) for name, loss in losses.items()}
    means, distances = ({name: found[name][-part.last :].mean() for name in WIRES} for found in (losses, apart))
    rows = [{"label": WIRES[name][0], "mean": means[name], "distance": f"{distances[name]:.1e}"} for name in WIRES]
    rows[0]["distance"] = "-"
    moved = max(abs(mean / means["ring"] - 1) for mean in means.values())
    _, plain, fed_back, _ = distances.values()
    title = f"Half the bytes, the mean loss within {moved:.2%}; "
    title += f"error feedback keeps it {plain / fed_back:.0f} times nearer"
    subtitle = f"{part.ranks} ranks in a ring, rounded at every hop; right: running mean of the distance at each step"
    with look.page(9, 2.9, title, subtitle) as figure:
        draw_losses(figure, losses, apart)
        figure.savefig(FIGURES / "wire.png", dpi=150)
    return part.filled(rows, measured_on=measured_on(runs["ring"]))


def draw_losses(figure: Figure, losses: dict[str, np.ndarray], apart: dict[str, np.ndarray]) -> None:
    """Loss of each run on the left; on the right its distance from float32's, as a running mean."""
    left, right = figure.subplots(1, 2)
    left.set_ylabel("training loss (nats per token)")
    right.set_ylabel("distance from float32's loss")
    for name, (label, colour, dashes) in WIRES.items():
        steps = np.arange(1, len(losses[name]) + 1)
        if name != "tree":  # it would lie on float32's curve
            left.plot(steps, losses[name], color=colour, linestyle=dashes, linewidth=1.3, label=label)
        if name != "ring":
            right.semilogy(steps, smooth(apart[name], len(steps) // 15), color=colour, linewidth=1.6, label=label)
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.grid(axis="y", color="#E6E6E6", linewidth=0.6)
        axes.legend(frameon=False, fontsize=8)
