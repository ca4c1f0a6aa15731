"""Parts of make_docs.py that train on this machine's cores: loss and memory."""

import shutil
from pathlib import Path
from statistics import fmean

import numpy as np

from gpt2.config import PRESETS
from gpt2.parameters import Layout
from scripts.makers.pages.page import FIGURES, Part, compare, log_of, measured_on, read

# Strategies of the part `wire` and their labels. `tree` adds in another order: its distance shows float32's rounding.
WIRES = {
    "ring": "float32",
    "ring/bfloat16": "bfloat16",
    "ring/bfloat16/error-feedback": "bfloat16, error feedback",
    "tree": "float32, added in another order",
}


def learning(part: Part, folder: Path) -> str:
    """Train a whole preset on two ranks."""
    runs = compare(folder, 2, "reduce-scatter", f"{part.training} {part.options.text}")
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
    """Compare a rank's peak memory under sharded strategies with ZeRO's formula."""
    rows = []
    for model, count in part.runs:
        runs = compare(folder / f"{model}-{count}", count, part.strategies, f"--model {model} {part.training}")
        for name, run in runs.items():
            formula, buffers = (4e-9 * elements for elements in held(name, Layout(PRESETS[model]), count))
            row = {"model": model, "count": count, "name": name, "formula": formula, "with_buffers": formula + buffers}
            rows.append(row | {"peak": max(read(run / "summary.json")["peak_memory_bytes"]) / 1e9})
    return part.filled(rows, measured_on=measured_on(run))


def held(strategy: str, layout: Layout, ranks: int) -> tuple[float, float]:
    """Count the float32 values that a rank of one node holds: (parameters, gradients and moments; buffers)."""
    embeddings, layer, *_, last = (stop - start for start, stop in layout.ranges)
    whole = layout.size
    part = layout.size / ranks
    room = embeddings + 2 * layer + last
    return {
        "reduce-scatter": (2 * whole + 2 * part, part),  # the sum of its block
        "hierarchical-sharded": (2 * whole + 2 * part, whole - part),  # sums of its neighbours' gradients
        "zero-2": (whole + 3 * part, room),
        "zero-3": (4 * part, 2 * room),
    }[strategy]


def wire(part: Part, folder: Path) -> str:
    """Train with each wire format and compare the losses of the last steps with float32's."""
    runs = compare(folder, part.ranks, ",".join(WIRES), part.training)
    losses = {name: np.array([line["loss"] for line in log_of(run)[-part.last :]]) for name, run in runs.items()}
    rows = []
    for name, label in WIRES.items():
        distance = np.abs(losses[name] - losses["ring"]).mean()
        rows.append({"label": label, "mean": losses[name].mean(), "distance": f"{distance:.1e}"})
    rows[0]["distance"] = "-"
    return part.filled(rows, measured_on=measured_on(runs["ring"]))
