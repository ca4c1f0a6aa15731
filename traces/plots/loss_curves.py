"""Plot of the loss over the steps of one run or several. Do they learn, and do they learn the same?"""

import numpy as np
from matplotlib.figure import Figure

from traces.plots import look
from traces.read.run_files import log_column
from traces.record.files import RunError
from traces.verdict.curves import compare_curves
from traces.verdict.summary import TimedRun

# Curves get thinner and more dotted, so that all are visible where they coincide.
COLOURS = (look.SKY, look.VERMILLION, "#000000", look.GREEN, look.PURPLE, look.ORANGE, look.BLUE)
DASHES = ("-", (0, (5, 3)), (0, (1, 2)), (0, (7, 2, 1, 2)), (0, (3, 5)), (0, (2, 1)), (0, (9, 4)))
MARKERS = "os^Dv<P"


def draw(measured: list[TimedRun]) -> Figure:
    """Draw the training loss in a light colour, its running mean over it, and validation losses as markers."""
    curves = [_curve(one) for one in measured]
    with look.page(9, 3.4, *_finding(measured, curves), notes=look.facts(measured)) as figure:
        axes = figure.subplots()
        for order, (one, curve) in enumerate(zip(measured, curves, strict=True)):
            _draw_curve(axes, one, curve, order, len(measured))
        axes.set_xlabel("step")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_ylabel("loss" if any("program" in one.run.config for one in measured) else "loss (nats per token)")
        axes.grid(axis="y", color="#E6E6E6", linewidth=0.6)
        axes.legend(frameon=False, loc="upper right", handlelength=4, title="line: training, marker: validation")
    return figure


def _curve(one: TimedRun) -> np.ndarray:
    """Return (3, S) float64: step, training loss, validation loss (nan where it was not evaluated)."""
    rows = [row for row in one.run.log if row.get("loss") is not None]
    if not rows:
        raise RunError(f"{one.run.path / 'log.jsonl'} holds no loss; train for at least one step")
    return np.array([log_column(rows, name) for name in ("step", "loss", "val_loss")])


def smooth(values: np.ndarray, width: int) -> np.ndarray:
    """Return the running mean over `width` values, (S,) to (S,).

    It is narrower at the start, where the curve is steep, and one-sided at the end, where a single value would look
    like a turn.
    """
    place = np.arange(len(values))
    half = width // 2
    low = np.maximum(place - half, 0)
    high = np.minimum(place + np.minimum(place, half), len(values) - 1) + 1
    total = np.concatenate([[0.0], np.cumsum(values)])
    return (total[high] - total[low]) / (high - low)


def smoothing_width(loss: np.ndarray) -> int:
    return max(1, len(loss) // 25)


def _draw_curve(axes, one: TimedRun, curve: np.ndarray, order: int, count: int) -> None:
    steps, loss, validation = curve
    colour = COLOURS[order % len(COLOURS)]
    behind = (count - 1 - order) / max(1, count - 1)
    width = 1.6 + 3 * behind
    size = 5.5 + 6 * behind
    marker = {"marker": MARKERS[order % len(MARKERS)], "markersize": size, "markerfacecolor": "white"}
    marker |= {"markeredgecolor": colour, "markeredgewidth": 1.3}
    line = {"color": colour, "linestyle": DASHES[order % len(DASHES)], "linewidth": width}
    axes.plot(steps, loss, color=colour, alpha=0.3, linewidth=max(0.7, width / 2))
    axes.plot(steps, smooth(loss, smoothing_width(loss)), **line)
    known = ~np.isnan(validation)
    axes.plot(steps[known], validation[known], **marker, linestyle="none")
    axes.plot([], [], **line, **(marker if known.any() else {}), label=one.label)


def _finding(measured: list[TimedRun], curves: list[np.ndarray]) -> tuple[str, str]:
    # Runs whose ranks exchange nothing are drawn, not compared.
    pairs = list(zip(measured, curves, strict=True))
    pairs = [(one, curve) for one, curve in pairs if one.figures["exchanges"]] or pairs[:1]
    measured, curves = zip(*pairs, strict=True)
    if len(curves) == 1:
        steps, loss, validation = curves[0]
        last = smooth(loss, smoothing_width(loss))[-1]
        known = validation[~np.isnan(validation)]
        subtitle = f"validation loss {known[-1]:.3f} at the last validation" if len(known) else ""
        return f"{measured[0].label}: loss from {loss[0]:.2f} to {last:.2f} in {int(steps[-1])} steps", subtitle
    found = compare_curves(measured)
    ends = ", ".join(f"{one.label} {curve[1][-1]:.3f}" for one, curve in zip(measured, curves, strict=True))
    return found.title, found.subtitle or f"last train loss: {ends}"
