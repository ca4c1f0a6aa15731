"""traces/plots/slices.py: lanes, bytes and how many slices are under way at a time, of calls that are known."""

import re

import numpy as np
import pytest
from matplotlib.collections import PolyCollection

from scripts.prediction.run_prediction import own_schedule
from scripts.reports import figures
from tests.support.drawn import is_inside, top_of
from tests.support.make_run import three_ranks, write_calls, write_run
from traces import read_run
from traces.plots import slices
from traces.verdict.summary import measure_runs

NODES = [0, 0, 1]
BYTES = [1_000_000, 1_500_000, 2_500_000]  # of each slice, on its way to its root and from it


def together(root, rank):
    """All reduces from 30 ms of the step on, all broadcasts from 50; the last rank's take 5 ms longer."""
    late = 5 * (rank == 2)
    return ("reduce", root, 30, 40 + late), ("bcast", root, 50, 60 + late)


def in_turn(root, rank):
    return ("reduce", root, 30 + 5 * root, 35 + 5 * root), ("bcast", root, 50 + 10 * root, 60 + 10 * root)


def measured_run(folder, when, steps=5):
    """Steps begin at 100 ms, 200 ms, ... (three_ranks). Each slice travels in two halves, one behind the other."""
    run = write_run(folder, three_ranks(steps), NODES, "sliced")
    for rank in range(3):
        calls = []
        for step in range(1, steps + 1):
            for root, size in enumerate(BYTES):
                for name, to, start, end in when(root, rank):
                    middle, zero = (start + end) / 2, 100 * step
                    calls.append((step, name, to, zero + start, zero + middle, size // 2))
                    calls.append((step, name, to, zero + middle, zero + end, size // 2))
        write_calls(run, rank, sorted(calls, key=lambda call: call[4]))
    return measure_runs([read_run(run)], own_schedule)[0]


@pytest.mark.parametrize(("when", "expected"), [(together, 3.0), (in_turn, 1.0)])
def test_slices_under_way_at_a_time_are_counted(tmp_path, when, expected):
    one = measured_run(tmp_path / "run", when)
    figure = slices.draw(one)
    assert is_inside(figure)
    (number, of) = re.search(r"([\d.]+) of (\d) slices under way", top_of(figure)).groups()
    assert float(number) == pytest.approx(expected, abs=0.05)
    assert of == "3"


def test_each_lane_has_its_roots_bytes_and_every_ranks_times(tmp_path):
    one = measured_run(tmp_path / "run", together)
    calls = slices.calls_of(one)
    assert [slices.slice_bytes(calls, root) for root in range(3)] == BYTES
    figure = slices.draw(one)
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert [text for text in texts if "MB" in text] == ["1 MB", "1.5 MB", "2.5 MB"]
    found = np.concatenate([
        [(*path.get_extents().min, *path.get_extents().max) for path in lines.get_paths()]
        for lines in figure.axes[0].collections if isinstance(lines, PolyCollection)
    ])  # fmt: skip
    assert len(found) == 3 * 3 * 2 * 2
    for root in range(3):
        lane = found[np.abs((found[:, 1] + found[:, 3]) / 2 - root) < 0.5]
        assert len(lane) == 3 * 2 * 2
        heights = sorted({round(low, 6) for low in lane[:, 1]})
        for rank, low in enumerate(heights):
            line = lane[np.isclose(lane[:, 1], low)]
            expected = [(start, end) for _, _, start, end in together(root, rank)]
            edges = sorted(line[:, [0, 2]].ravel())
            wanted = [edge for start, end in expected for edge in (start, *[(start + end) / 2] * 2, end)]
            np.testing.assert_allclose(edges, wanted, atol=1e-6)


def test_a_run_without_calls_has_no_such_figure(tmp_path):
    (without,) = measure_runs([read_run(write_run(tmp_path / "without", three_ranks(5), NODES))], own_schedule)
    assert slices.draw(without) is None
    assert "slices" not in figures.figures_of_run(without)
    assert "slices" in figures.figures_of_run(measured_run(tmp_path / "with", together))


def test_a_rank_without_a_trace_takes_its_slice_along(tmp_path):
    measured_run(tmp_path / "run", together)
    (tmp_path / "run" / "traces" / "rank-00001.trace").unlink()
    (part,) = measure_runs([read_run(tmp_path / "run", allow_missing=True)], own_schedule)
    calls = slices.calls_of(part)
    assert sorted(set(calls.root)) == sorted(set(calls.rank)) == [0, 1]
    assert [slices.slice_bytes(calls, root) for root in range(2)] == [BYTES[0], BYTES[2]]
    assert is_inside(slices.draw(part))
