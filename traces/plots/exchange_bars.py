"""Plot of bench_exchange.py: each contender's time as a multiple of the network's bound, and the busiest node's bytes.

Which exchanges come close to the limit of the network, and which ones send too much?
"""

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from traces.plots import look
from traces.units import count_text, short_ms

ROW_INCHES = 0.235  # of a bar
BETWEEN_INCHES = 0.75  # around the bars of one size
# A full Ethernet frame of 1514 bytes carries 1448 bytes of data; the rest is headers, TCP's time stamps included.
HEADERS = 1.045
FAMILIES = {
    "own": (look.BLUE, "strategy, own exchange"),
    "strategy": (look.SKY, "strategy, MPI's collectives"),
    "mpi": ("#A6A6A6", "MPI's collectives alone"),
}
HALF = {"hatch": "////", "edgecolor": "white", "linewidth": 0}


def draw(report: dict) -> Figure:
    """Draw the bars of each size, the fastest on top. report: the output of scripts/bench_exchange.py --json."""
    sizes = [(size, _from_fast_to_slow(size)) for size in report["sizes"]]
    heights = [ROW_INCHES * len(contenders) for _, contenders in sizes]
    is_bounded = report["sizes"][-1]["bound_s"] is not None
    # Draw bytes only if there is a bound to compare them with.
    columns = {"ncols": 2, "width_ratios": (2.2, 1)} if is_bounded else {}
    handles = _handles([one for _, contenders in sizes for one in contenders.values()])
    inches = sum(heights) + BETWEEN_INCHES * len(sizes)
    notes = [
        f"median of {report['settings']['repeat']} in turns, line from shortest to longest",
        look.short_library(report["mpi_library"]),
        f"{report['machine']['processor']}, {report['machine']['cores']} cores",
        "bytes by the nodes' interface counters; every sum checked on every rank",
    ]
    with look.page(9, inches, finding(report), _subtitle(report), handles, notes) as figure:
        rows = figure.subplots(len(sizes), height_ratios=heights, squeeze=False, **columns)
        for (left, *right), (size, contenders) in zip(rows, sizes, strict=True):
            _draw_times(left, size, contenders)
            for axes in right:
                _draw_bytes(axes, size, contenders, report)
            if len(sizes) > 1:
                left.set_title(_megabytes(size), loc="left", size=10, weight="bold", pad=16)
    return figure


def finding(report: dict) -> str:
    """Compare the fastest float32 exchange of the largest size with MPI's all-reduce, or else with the slowest one."""
    size = report["sizes"][-1]
    ranking = _alike(size)
    name, best = next(iter(ranking.items()))
    if size["bound_s"] is None:
        return f"{name} exchanges {_megabytes(size)} in {short_ms(best['seconds']['median'] * 1e3, 3)} ms"
    at = f"{_megabytes(size)}: " if len(report["sizes"]) > 1 else ""
    text = f"{at}{name} takes {best['times_bound']:.2f} times the network's bound"
    others = [other for other in ranking if other != name]
    if not others:
        return text
    other = "MPI_Allreduce" if "MPI_Allreduce" in others else others[-1]
    return f"{text}, {other} {ranking[other]['times_bound']:.2f}"


def _alike(size: dict) -> dict[str, dict]:
    """Return the contenders that do equal work (whole exchanges in float32) from fast to slow; if none do, all."""
    ranking = _from_fast_to_slow(size)
    return {name: one for name, one in ranking.items() if one["whole"] and one["wire"] == "float32"} or ranking


def _from_fast_to_slow(size: dict) -> dict[str, dict]:
    return dict(sorted(size["contenders"].items(), key=lambda item: item[1]["seconds"]["median"]))


def _subtitle(report: dict) -> str:
    sizes = " and ".join(_megabytes(size) for size in report["sizes"])
    text = f"one exchange of {sizes} of gradients, {report['ranks']} ranks on {count_text(report['nodes'], 'node')}"
    if report["sizes"][-1]["bound_s"] is None:
        return text
    probed = "" if report["link"]["nominal"] else " as probed"
    return f"{text}, {report['link']['bytes_per_s'] * 8 / 1e6:,.0f} Mbit/s each way through a node's port{probed}"


def _megabytes(size: dict) -> str:
    return f"{size['bytes'] / 1e6:.4g} MB"


def _handles(contenders: list[dict]) -> list[Patch]:
    present = {one["family"] for one in contenders}
    handles = [Patch(facecolor=colour, label=text) for family, (colour, text) in FAMILIES.items() if family in present]
    if not all(one["whole"] for one in contenders):
        handles.append(Patch(facecolor=FAMILIES["mpi"][0], **HALF, label="half an exchange"))
    return handles


def _draw_times(axes, size: dict, contenders: dict[str, dict]) -> None:
    bound_s = size["bound_s"]
    unit_s = bound_s or 1e-3
    top = max(one["seconds"]["max"] for one in contenders.values()) / unit_s
    for place, one in enumerate(contenders.values()):
        median, low, high = (one["seconds"][key] / unit_s for key in ("median", "min", "max"))
        _draw_bar(axes, place, median, one)
        axes.plot([low, high], [place, place], color=look.INK, linewidth=1.1, solid_capstyle="butt")
        _write(axes, place, high, f"{median:.2f}" if bound_s else short_ms(median, 3))
    _style_rows(axes, list(contenders), top * 1.12)
    axes.set_xlabel("time, in units of the bound" if bound_s else "milliseconds")
    fastest = next(iter(_alike(size)))
    for label in axes.get_yticklabels():
        label.set_weight("bold" if label.get_text() == fastest else "normal")
    if bound_s:
        _draw_limit(axes, 1, f"bound, {bound_s * 1e3:.0f} ms", (-3, 4), "right")
        _draw_limit(axes, HEADERS, f"{HEADERS:.3f}: with TCP/IP headers", (3, 4), "left", linewidth=1.2, linestyle=":")


def _draw_bytes(axes, size: dict, contenders: dict[str, dict], report: dict) -> None:
    into = [max(bytes_in for bytes_in, _ in one["node_bytes"]) / 1e6 for one in contenders.values()]
    for place, (megabytes, one) in enumerate(zip(into, contenders.values(), strict=True)):
        _draw_bar(axes, place, megabytes, one)
        _write(axes, place, megabytes, short_ms(megabytes, 3))
    _style_rows(axes, [""] * len(contenders), max(into) * 1.25)
    axes.set_xlabel("MB into the busiest node")
    least = size["bound_s"] * report["link"]["bytes_per_s"] / 1e6
    _draw_limit(axes, least, f"least, {least:.1f}", (0, 4), "center")


def _draw_limit(axes, at: float, text: str, points: tuple[int, int], align: str, **line) -> None:
    """Draw a vertical line with its text above it, `points` from the line's end."""
    axes.axvline(at, color=look.VERMILLION, **{"linewidth": 1.4} | line)
    over = {"xycoords": ("data", "axes fraction"), "ha": align, "size": 8, "color": look.VERMILLION}
    look.note(axes, text, (at, 1), points, **over)


def _draw_bar(axes, place: int, length: float, one: dict) -> None:
    axes.barh(place, length, 0.74, color=FAMILIES[one["family"]][0], **({} if one["whole"] else HALF))


def _write(axes, place: int, beside: float, text: str) -> None:
    """Write the bar's number, on a background that hides lines."""
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
    look.note(axes, text, (beside, place), (5, 0), va="center", size=8.5, bbox=box)


def _style_rows(axes, names: list[str], right: float) -> None:
    axes.set_xlim(0, right)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_yticks(range(len(names)), names, size=9)
    axes.tick_params(axis="y", length=0)
