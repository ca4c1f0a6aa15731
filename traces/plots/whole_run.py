"""Plot of loss, learning rate, gradient norm, throughput and memory over all steps of a run, with its restarts."""

import numpy as np
from matplotlib.figure import Figure

from traces.plots import look
from traces.plots.loss_curves import smooth, smoothing_width
from traces.read.run_files import log_column
from traces.read.starts import restarts_of
from traces.units import count_text
from traces.verdict.summary import TimedRun

MOST_COLUMNS = 800  # more steps are drawn as minimum, mean and maximum of neighbouring steps
FEW_STEPS = 20  # fewer points get markers: a line of one step would be invisible
START = 0.05  # the first fraction of the steps, in which an untrained model's loss falls
SPIKE = 10  # the scale of norms is logarithmic if their maximum is more than this many medians
# (field of log.jsonl, label of the axis, unit, colour), from top to bottom.
PANELS = (
    ("loss", "loss\n(nats)", 1, look.BLUE),
    ("lr", "learning\nrate", 1, look.ORANGE),
    ("grad_norm", "gradient\nnorm", 1, look.PURPLE),
    ("tokens_per_s", "tokens/s", 1, look.GREEN),
    ("peak_memory_bytes", "memory of\na rank (GB)", 1e9, look.VERMILLION),
    ("gpu_memory_bytes", "memory of\na GPU (GB)", 1e9, look.VERMILLION),
)
FROM_ZERO = ("lr", "tokens_per_s", "peak_memory_bytes", "gpu_memory_bytes")
HELD = ("peak_memory_bytes", "gpu_memory_bytes")  # logged only when they change


def draw(measured: TimedRun) -> Figure:
    """Draw a panel for each quantity that log.jsonl has. The log must have rows."""
    log = measured.run.log
    steps = np.array([row["step"] for row in log])
    is_skipped = np.array(["skipped" in row for row in log])
    panels = [(*panel, column) for panel in PANELS if np.isfinite(column := _column(log, panel[0]) / panel[2]).any()]
    # The log of one start (--start K) begins after that start's own restart.
    found = restarts_of(measured.run.config)
    restarts = {step: times for step, times in found.items() if steps[0] <= step < steps[-1]}
    heights = [2.0 if name == "loss" else 1.0 for name, *_ in panels]
    with look.page(9, 1.05 * sum(heights) + 0.4, *_title(measured, restarts), notes=look.facts([measured])) as figure:
        grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        for axes, (name, label, _, colour, values) in zip(grid, panels, strict=True):
            if name == "grad_norm":
                _draw_points(axes, [row for row in log if "skipped" in row], "grad_norm", "x", "skipped")
                values = np.where(is_skipped, np.nan, values)  # drawn as crosses instead, and not part of the mean
            known = np.isfinite(values)
            if known.any():
                _draw_panel(axes, name, steps[known], values[known], colour, restarts)
            axes.set_ylabel(label, rotation=0, ha="left", va="center", labelpad=62)
            for step in restarts:
                axes.axvline(step + 0.5, color=look.INK, linewidth=0.7, linestyle=(0, (4, 3)))
            if name == "loss":
                _draw_points(axes, log, "val_loss", "o", "validation")
        _label_first(grid[0], restarts, steps)
        grid[-1].set_xlabel("step")
        grid[-1].xaxis.get_major_locator().set_params(integer=True)
        beside = max(0.5, 0.01 * (steps[-1] - steps[0]))
        grid[-1].set_xlim(steps[0] - beside, steps[-1] + beside)
        figure.align_ylabels(grid)
    return figure


def _column(log: list[dict], name: str) -> np.ndarray:
    """Return (S,) float64 of a field, nan where it is missing; for fields of HELD, the last logged value."""
    values = log_column(log, name)
    if name in HELD:
        noted = np.maximum.accumulate(np.where(np.isfinite(values), np.arange(len(values)), 0))
        values = values[noted]
    return values


def _draw_panel(axes, name: str, steps: np.ndarray, values: np.ndarray, colour: str, restarts) -> None:
    at, least, mean, most = in_columns(steps, values)
    if name in (*HELD, "lr"):
        axes.plot(at, mean, color=colour, linewidth=1.4, drawstyle="default" if name == "lr" else "steps-mid")
    else:
        axes.fill_between(at, least, most, color=colour, alpha=0.25, linewidth=0)
        axes.plot(at, mean, color=colour, alpha=0.35, linewidth=0.8)
        axes.plot(at, smooth_between(at, mean, restarts), color=colour, linewidth=1.6)
    if len(at) <= FEW_STEPS:
        axes.plot(at, mean, "o", color=colour, markersize=4)
    axes.grid(axis="y", color="#E6E6E6", linewidth=0.6)
    low = axes.dataLim.y0
    high = axes.dataLim.y1
    if name in FROM_ZERO and low >= 0:
        axes.set_ylim(0, 1.15 * high or 1)
    elif name == "grad_norm" and low > 0 and high > SPIKE * np.median(values):
        axes.set_yscale("log")
    elif name == "loss":
        _leave_start_out(axes, values)


def smooth_between(at: np.ndarray, values: np.ndarray, restarts) -> np.ndarray:
    """Return running means of each start's own values, so that a change at a restart is visible there."""
    parts = np.split(values, np.searchsorted(at, np.array(sorted(restarts)) + 0.5))
    return np.concatenate([smooth(part, smoothing_width(values)) for part in parts])


def in_columns(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return (place, minimum, mean, maximum) of at most MOST_COLUMNS columns of neighbouring steps; each (columns,)."""
    first = np.unique(np.linspace(0, len(steps), min(len(steps), MOST_COLUMNS), endpoint=False).astype(int))
    counts = np.diff([*first, len(steps)])
    place, mean = (np.add.reduceat(column, first) / counts for column in (steps, values))
    return place, np.fmin.reduceat(values, first), mean, np.fmax.reduceat(values, first)


def _leave_start_out(axes, loss: np.ndarray) -> None:
    """Leave the high losses of the first steps out if they hide the rest, and write where the loss began."""
    rest = loss[int(START * len(loss)) :]
    high = rest.max()
    least = loss.min()
    begun = loss[0]
    if high > least and begun - least > 2 * (high - least):
        axes.set_ylim(least - 0.08 * (high - least), high + 0.25 * (high - least))
        axes.text(0.1, 0.97, f"begins at {begun:.3g}", transform=axes.transAxes, va="top", size=8, color=look.FAINT)


def _draw_points(axes, rows: list[dict], name: str, marker: str, label: str) -> None:
    """Draw a field of those rows that have it."""
    points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    if points:
        style = {"color": look.INK, "markersize": 5, "markerfacecolor": "white"}
        axes.plot(*zip(*points, strict=True), marker, **style, label=label)
        axes.legend(frameon=False, loc="upper right", fontsize=8)


def _label_first(axes, restarts: dict[int, int], steps: np.ndarray) -> None:
    """Write "restart" beside the first restart's line, on the side with more space."""
    if restarts:
        step = min(restarts)
        is_late = step > (steps[0] + steps[-1]) / 2
        points = (-3, -2) if is_late else (3, -2)
        align = "right" if is_late else "left"
        place = {"xycoords": ("data", "axes fraction"), "ha": align, "va": "bottom"}
        look.note(axes, "restart", (step + 0.5, 1), points, size=8, **place)


def _title(measured: TimedRun, restarts: dict[int, int]) -> tuple[str, str]:
    log = measured.run.log
    title = f"{measured.label}: steps {log[0]['step']:,} to {log[-1]['step']:,}"
    count = sum(restarts.values())
    title += f", resumed {'once' if count == 1 else f'{count} times'}" if count else ""
    after = [f"{step:,}" for step in sorted(restarts)]
    shown = ", ".join(after[:6]) + (", ..." if after[6:] else "")
    facts = [f"restarts after step {shown}"] if after else []
    skipped = sum("skipped" in row for row in log)
    facts += [f"{count_text(skipped, 'update')} skipped"] if skipped else []
    return title, "; ".join(facts)
