"""Part of make_docs.py: what bfloat16 on the wire does to the loss, beside what another order of additions does."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from scripts.makers.pages.page import FIGURES, compare, log_of, machine, replace_block
from traces.plots import look
from traces.plots.loss_curves import smooth

RANKS, STEPS, LAST = 4, 300, 100
TRAINING = f"--steps {STEPS} --eval-every 0"
# Another strategy adds in another order: what float32's own rounding does.
CONTROL = "tree"
RUNS = {
    "ring": ("float32", "#000000"),
    "ring/bfloat16": ("bfloat16", look.VERMILLION),
    "ring/bfloat16/error-feedback": ("bfloat16, error feedback", look.BLUE),
    CONTROL: ("float32, added in another order", "#A6A6A6"),
}


def wire(folder: Path, _) -> None:
    compare(folder, RANKS, ",".join(RUNS), TRAINING.split())
    folders = {name: folder / name.replace("/", "-") for name in RUNS}
    losses = {name: np.array([line["loss"] for line in log_of(run)]) for name, run in folders.items()}
    draw(losses).savefig(FIGURES / "wire.png", dpi=150)
    apart = {name: np.abs(loss - losses["ring"]) for name, loss in losses.items() if name != "ring"}
    rows = ["| on the wire | mean loss of the last steps | mean distance from float32 there |", "|---|---|---|"]
    for name, (label, _) in RUNS.items():
        distance = f"{apart[name][-LAST:].mean():.1e}" if name in apart else "-"
        rows.append(f"| {label} | {losses[name][-LAST:].mean():.4f} | {distance} |")
    rows += ["", f"`mpirun -n {RANKS} python scripts/train.py --strategy ring {TRAINING}`, and `--wire bfloat16` with "]
    rows[-1] += f"and without `--error-feedback`; `--strategy {CONTROL}` adds in another order. The last {LAST} steps. "
    rows[-1] += machine(folders["ring"])
    replace_block("docs/benchmarks.md", "wire", "\n".join(rows))


def draw(losses: dict[str, np.ndarray]) -> Figure:
    """Loss of each run on the left; on the right its distance from float32's, as a running mean."""
    with look.page(9, 3.0, *finding(losses)) as figure:
        left, right = figure.subplots(1, 2)
        steps, dashes = np.arange(1, STEPS + 1), iter(("-", (0, (5, 2)), (0, (1, 1.5)), "-"))
        for name, (label, colour) in RUNS.items():
            dash = next(dashes)
            if name != CONTROL:
                left.plot(steps, losses[name], color=colour, linestyle=dash, linewidth=1.3, label=label)
            if name != "ring":
                distance = smooth(np.abs(losses[name] - losses["ring"]), STEPS // 15)
                right.semilogy(steps, distance, color=colour, linewidth=1.6, label=label)
        left.set_ylabel("training loss (nats per token)")
        right.set_ylabel("distance from float32's loss")
        for axes in (left, right):
            axes.set_xlabel("step")
            axes.grid(axis="y", color="#E6E6E6", linewidth=0.6)
            axes.legend(frameon=False, fontsize=8)
    return figure


def finding(losses: dict[str, np.ndarray]) -> tuple[str, str]:
    last = {name: loss[-LAST:] for name, loss in losses.items()}
    moved = max(abs(last[name].mean() / last["ring"].mean() - 1) for name in losses)
    plain, fed_back = (np.abs(last[name] - last["ring"]).mean() for name in list(RUNS)[1:3])
    nearer = plain / fed_back
    return (
        f"Half the bytes, the mean loss within {moved:.2%}; error feedback keeps it {nearer:.0f} times nearer",
        f"{RANKS} ranks in a ring, rounded at every hop; right: running mean of the distance at each step",
    )
