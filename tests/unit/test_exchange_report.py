"""What bench_exchange.py makes of its repetitions: bound and rates, the tables, the figure."""

import copy
from types import SimpleNamespace

import pytest

from scripts.exchange_bench.exchange_table import lower_bound_s, summarize, table
from tests.support.drawn import is_inside
from traces.plots import exchange_bars


def test_bound_and_rates():
    """The project's case by hand: 8 MB, 5 nodes, 400 Mbit/s; the middle of three repetitions."""
    bound_s = lower_bound_s(8_000_000, 5, 50e6)
    assert bound_s == pytest.approx(0.256)
    assert lower_bound_s(8_000_000, 1, None) is None
    repetitions = [
        {"seconds": seconds, "cpu_s": seconds / 2, "node_bytes": [[10 * count, 1], [7, 20 + count]]}
        for count, seconds in enumerate((0.512, 0.3, 2.0))
    ]
    contender = SimpleNamespace(family="mpi", wire="float32", whole=True)
    figures = summarize(contender, repetitions, 8_000_000, 9, bound_s)
    assert figures["seconds"] == {"median": 0.512, "min": 0.3, "max": 2.0}
    assert figures["times_bound"] == pytest.approx(2)
    assert figures["algbw"] == pytest.approx(8e6 / 0.512)
    assert figures["busbw"] == pytest.approx(8e6 / 0.512 * 16 / 9)
    assert figures["node_bytes"] == [[10, 1], [7, 21]]
    contender.whole = False
    half = summarize(contender, repetitions, 8_000_000, 9, bound_s)
    assert half["busbw"] == half["algbw"]


def figures_of(family, seconds, wire="float32", whole=True, node_bytes=((12_800_000, 12_800_000),) * 5):
    spread = {"median": seconds, "min": 0.9 * seconds, "max": 1.1 * seconds}
    return {
        "family": family, "wire": wire, "whole": whole, "seconds": spread, "times_bound": seconds / 0.256,
        "algbw": 8e6 / seconds, "busbw": 8e6 / seconds, "cpu_s": 0.1, "node_bytes": [list(ways) for ways in node_bytes],
    }  # fmt: skip


@pytest.fixture
def report():
    lopsided = [[27_000_000, 19_000_000], *[[9_000_000, 15_000_000]] * 4]
    contenders = {
        "MPI_Allreduce": figures_of("mpi", 0.768),
        "MPI_Bcast": figures_of("mpi", 0.2, whole=False),
        "hierarchical/bfloat16": figures_of("own", 0.15, "bfloat16"),
        "hierarchical": figures_of("own", 0.2816),
        "reduce-bcast": figures_of("strategy", 1.0, node_bytes=lopsided),
    }  # fmt: skip
    return {
        "settings": {"repeat": 3}, "ranks": 9, "nodes": 5, "link": {"bytes_per_s": 50e6, "nominal": True},
        "machine": {"processor": "AMD EPYC", "cores": 2}, "mpi_library": "MPICH Version: 5.0.2",
        "sizes": [{"bytes": 8_000_000, "bound_s": 0.256, "contenders": contenders}],
    }  # fmt: skip


def on_one_node(report):
    result = copy.deepcopy(report) | {"nodes": 1}
    for size in result["sizes"]:
        size["bound_s"] = None
        for one in size["contenders"].values():
            one |= {"times_bound": None, "node_bytes": [[0, 0]]}
    return result


def test_the_table_goes_from_fast_to_slow(report):
    head, link, _, columns, *rows = table(report, report["sizes"][0]).splitlines()
    assert "9 ranks on 5 nodes" in head
    assert "bound 256.0 ms" in head
    assert "400 Mbit/s each way (nominal)" in link
    assert [row.split()[0] for row in rows[:5]] == [
        "hierarchical/bfloat16", "MPI_Bcast", "hierarchical", "MPI_Allreduce", "reduce-bcast"
    ]  # fmt: skip
    heads = "median, ms min max x bound algbw, GB/s busbw max in, MB max out CPU, ms"
    assert " ".join(columns.split()) == heads
    assert " ".join(rows[4].split()) == "reduce-bcast 1000.0 900.0 1100.0 3.906 0.0080 0.0080 27.00 19.00 100"


def test_one_node_has_no_bound(report):
    text = table(on_one_node(report), on_one_node(report)["sizes"][0])
    assert "no network and no bound" in text
    assert "x bound" not in text


def test_the_figure_says_who_comes_close(report):
    figure = exchange_bars.draw(report)
    title = figure.texts[0].get_text()
    assert title == "hierarchical takes 1.10 times the network's bound, MPI_Allreduce 3.00"
    times, into = figure.axes
    names = [label.get_text() for label in times.get_yticklabels()]
    assert names[0] == "hierarchical/bfloat16"
    assert names[-1] == "reduce-bcast"
    assert {round(line.get_xdata()[0], 3) for line in times.lines if len(set(line.get_xdata())) == 1} == {1.0, 1.045}
    lengths = [bar.get_width() for bar in into.patches]
    assert lengths[-1] == pytest.approx(27)
    assert any(text.get_text().endswith("9 ranks on 5 nodes, 400 Mbit/s each way through a node's port")
               for text in figure.texts)  # fmt: skip
    assert is_inside(figure)


def test_figures_of_several_sizes_of_few_and_of_one_node(report):
    larger = copy.deepcopy(report)
    larger["sizes"].append(copy.deepcopy(larger["sizes"][0]) | {"bytes": 64_000_000})
    assert exchange_bars.finding(larger).startswith("64 MB: hierarchical takes")
    assert len(exchange_bars.draw(larger).axes) == 4
    assert is_inside(exchange_bars.draw(larger))
    alone = exchange_bars.draw(on_one_node(report))
    (times,) = alone.axes
    assert times.get_xlabel() == "milliseconds"
    assert max(bar.get_width() for bar in times.patches) == pytest.approx(1000)
    assert is_inside(alone)

    only_half = copy.deepcopy(report)
    contenders = only_half["sizes"][0]["contenders"]
    only_half["sizes"][0]["contenders"] = {"MPI_Bcast": contenders["MPI_Bcast"]}
    assert exchange_bars.finding(only_half) == "MPI_Bcast takes 0.78 times the network's bound"
    assert is_inside(exchange_bars.draw(only_half))
