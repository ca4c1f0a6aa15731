"""Plot: bytes from each rank to each other in one exchange, as the strategy's messages say; the nodes' sums beside.

Made from the schedule alone: it shows what a strategy does to a cluster before anyone runs it.
"""

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from traces.plots import look

DECADES = 3


def draw(title: str, matrix: np.ndarray, nodes: list[int]) -> Figure:
    """matrix: (N, N) bytes from rank (row) to rank (column); nodes: of each rank, in order."""
    between = node_matrix(matrix, nodes)
    with look.styled():
        figure = Figure(figsize=(9, 4.6))
        look.headline(figure, _finding(title, between))
        highest = max(matrix.max(), between.max(), 1) * 1e-6
        norm = LogNorm(highest / 10**DECADES, highest)
        ranks = figure.add_axes((0.075, 0.115, 0.36, 0.70))
        image = _draw_table(ranks, matrix * 1e-6, norm, "rank")
        _separate_nodes(ranks, nodes)
        _draw_table(figure.add_axes((0.525, 0.115, 0.36, 0.70)), between * 1e-6, norm, "node", numbers=True)
        bar = figure.colorbar(image, cax=figure.add_axes((0.915, 0.115, 0.014, 0.70)))
        bar.outline.set_visible(False)
        bar.ax.set_title("MB", size=8, loc="left", pad=5)
    return figure


def node_matrix(matrix: np.ndarray, nodes: list[int]) -> np.ndarray:
    """(M, M) bytes between nodes, 0 within one."""
    numbers = sorted(set(nodes))
    member = np.array([[node == number for node in nodes] for number in numbers], np.float64)
    between = member @ matrix @ member.T
    np.fill_diagonal(between, 0)
    return between


def _draw_table(axes, table: np.ndarray, norm, what: str, numbers: bool = False):
    image = axes.imshow(np.ma.masked_equal(table, 0), cmap="cividis_r", norm=norm, interpolation="nearest")
    axes.set_xlabel(f"to {what}", labelpad=2)
    axes.set_ylabel(f"from {what}", labelpad=2)
    every = max(1, -(-len(table) // 16))
    axes.set_xticks(range(0, len(table), every))
    axes.set_yticks(range(0, len(table), every))
    if numbers:
        axes.set_title(f"in: {_most(table.sum(axis=0))}   out: {_most(table.sum(axis=1))}", size=8.5, loc="left")
        if len(table) <= 8:
            _write_numbers(axes, table, norm)
    return image


def _most(sums: np.ndarray) -> str:
    return f"{sums.min():.3g} to {sums.max():.3g} MB a node"


def _write_numbers(axes, table: np.ndarray, norm) -> None:
    for (row, column), value in np.ndenumerate(table):
        if value > 0:
            ink = "white" if norm(value) > 0.5 else look.INK
            axes.text(column, row, f"{value:.2g}", ha="center", va="center", size=7.5, color=ink)


def _separate_nodes(axes, nodes: list[int]) -> None:
    for place in np.flatnonzero(np.diff(nodes)) + 0.5:
        axes.axhline(place, color=look.FAINT, linewidth=0.6)
        axes.axvline(place, color=look.FAINT, linewidth=0.6)


def _finding(title: str, between: np.ndarray) -> str:
    into, out = between.sum(axis=0), between.sum(axis=1)
    if not into.max():
        return f"{title}: nothing leaves a node"
    node, way, most = max(
        ((int(np.argmax(sums)), way, float(sums.max())) for way, sums in (("receives", into), ("sends", out))),
        key=lambda one: one[2],
    )
    mean = into.mean()
    if most < 1.05 * mean:
        return f"{title}: every node sends and receives {mean * 1e-6:.3g} MB"
    return f"{title}: node {node} {way} {most * 1e-6:.3g} MB, {most / mean:.1f} times the mean of the nodes"
