"""Plot: each run's measured exchange against what the cost model says of it. Is the explanation right?"""

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

from traces.plots import look

WITHIN = 0.15


def draw(points: list[tuple[str, float, float]], subtitle: str = "") -> Figure:
    """points: (label, predicted seconds, measured seconds) of one exchange each."""
    with look.styled():
        figure = Figure(figsize=(6.4, 5.2))
        look.headline(figure, _finding(points), subtitle)
        axes = figure.add_axes((0.13, 0.11, 0.83, 0.75))
        low = 0.7 * min(min(predicted, measured) for _, predicted, measured in points) * 1e3
        high = 1.5 * max(max(predicted, measured) for _, predicted, measured in points) * 1e3
        line = [low, high]
        axes.fill_between(line, [x * (1 - WITHIN) for x in line], [x * (1 + WITHIN) for x in line], color=look.BAND)
        axes.plot(line, line, color=look.FAINT, lw=0.8)
        for label, predicted, measured in points:
            axes.plot(predicted * 1e3, measured * 1e3, "o", color=look.BLUE, ms=6)
            is_far_right = predicted * 1e3 > low ** (1 / 3) * high ** (2 / 3)
            side = {"xytext": (-7, -3), "ha": "right"} if is_far_right else {"xytext": (7, -3)}
            axes.annotate(label, (predicted * 1e3, measured * 1e3), textcoords="offset points", size=8, **side)
        for axis, scale, limits in ((axes.xaxis, axes.set_xscale, axes.set_xlim),
                                    (axes.yaxis, axes.set_yscale, axes.set_ylim)):  # fmt: skip
            scale("log")
            limits(low, high)
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(ScalarFormatter())
            axis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("the model's exchange, ms")
        axes.set_ylabel("measured, ms")
        axes.annotate(f"± {WITHIN:.0%}", (high / 1.1, high / 1.1 * (1 - WITHIN)), ha="right", va="top", size=8,
                      color=look.FAINT)  # fmt: skip
    return figure


def _finding(points) -> str:
    label, off = max(((label, measured / predicted - 1) for label, predicted, measured in points),
                     key=lambda one: abs(one[1]))  # fmt: skip
    if abs(off) <= WITHIN:
        return f"The model is within {max(abs(off), 0.01):.0%} of every measured exchange"
    return f"The model misses {label} most: {'slower' if off > 0 else 'faster'} than it says by {abs(off):.0%}"
