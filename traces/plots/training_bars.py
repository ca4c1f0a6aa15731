"""Plot of bench_training.py: a bar for each contender, its step split into computing and the exposed exchange.

How much longer than its computing does a step take, with our strategies and PyTorch's, on links of different rates?
"""

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from traces.plots import look
from traces.units import count_text, short_count

ROW_INCHES = 0.26  # a bar
BETWEEN_INCHES = 0.72  # around the bars of one report
PARTS = {"compute_s": (look.BLUE, "computing"), "exposed_s": (look.VERMILLION, "exchange that shows")}
OURS = "ours"
DDP = "DDP"


def draw(reports: list[dict]) -> Figure:
    """Draw a panel for each report that scripts/bench_training.py --json wrote, the fastest contender on top."""
    heights = [ROW_INCHES * len(report["contenders"]) for report in reports]
    handles = [Patch(facecolor=colour, label=label) for colour, label in PARTS.values()]
    first = reports[0]
    notes = [
        "medians of steps in turns; number: seconds of a step",
        f"{first['machine']['processor']}, {first['machine']['cores']} cores",
        look.short_library(first["mpi_library"]),
    ]
    inches = sum(heights) + BETWEEN_INCHES * len(reports)
    with look.page(9, inches, finding(reports), subtitle(reports), handles, notes) as figure:
        rows = figure.subplots(len(reports), height_ratios=heights, squeeze=False)[:, 0]
        for axes, report in zip(rows, reports, strict=True):
            _draw_steps(axes, report)
    return figure


def finding(reports: list[dict]) -> str:
    """Say how much faster our default step is than DDP's, if that was measured."""
    ratios = [report["contenders"].get(OURS, {}).get("times_as_fast") for report in reports]
    known = sorted({f"{ratio:.1f}" for ratio in ratios if ratio is not None}, key=float)
    if not known:
        return "A training step: what its exchange adds to computing"
    return f"A training step is {' to '.join(dict.fromkeys((known[0], known[-1])))} times as fast as DDP's over gloo"


def subtitle(reports: list[dict]) -> str:
    ranks = dict.fromkeys(count_text(report["ranks"], "rank") for report in reports)
    least = "dashed: the least that a step takes with a float32 wire"
    return f"{' and '.join(ranks)}, same model, windows and AdamW; {least}"


def panel_title(report: dict) -> str:
    """Return a title: "30M parameters, 4 nodes, links of 400 Mbit/s"."""
    place = f"{short_count(report['parameters'])} parameters, {count_text(report['nodes'], 'node')}"
    rate = report["link"]["bytes_per_s"]
    return f"{place}, links of {rate * 8 / 1e6:,.0f} Mbit/s" if rate else place


def _draw_steps(axes, report: dict) -> None:
    order = dict(sorted(report["contenders"].items(), key=lambda item: -item[1]["step_s"]))
    for row, one in enumerate(order.values()):
        left = 0.0
        for key, (colour, _) in PARTS.items():
            axes.barh(row, one[key], left=left, height=0.72, color=colour, edgecolor="white", linewidth=0.6)
            left += one[key]
        behind = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # hides the dashed line
        number = axes.annotate(f"{one['step_s']:.2f}", (left, row), (4, 0), textcoords="offset points", bbox=behind)
        number.set(va="center", size=8)
    axes.set_yticks(range(len(order)), list(order))
    for label in axes.get_yticklabels():
        label.set_fontweight("bold" if label.get_text().startswith(OURS) else "normal")
    axes.axvline(report["least_s"], color=look.INK, linewidth=1, linestyle=(0, (4, 3)))
    axes.set_xlim(0, 1.08 * max(one["step_s"] for one in order.values()))
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("seconds of a step")
    axes.set_title(panel_title(report), loc="left", size=10, weight="bold")
