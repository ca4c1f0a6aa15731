"""The picture of a whole run: what it draws of a log, where it marks restarts, what it leaves out."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from scripts.prediction.run_prediction import own_schedule
from scripts.reports.verdict import start_text
from scripts.training.meeting import MeetingPoint, RankReports
from scripts.training.step_records import StepRecords
from scripts.training.utilization import PeakRate
from tests.support.drawn import is_inside, top_of
from tests.support.make_run import simulate, write_run
from traces import read_run
from traces.plots import whole_run
from traces.read.starts import restarts_of, starts_of
from traces.verdict.summary import measure_runs

pytestmark = pytest.mark.any_mpi


def log_of(count, **changed):
    """A row a step; changed: step_N gives fields that step N has besides."""
    rows = []
    for step in range(1, count + 1):
        row = {
            "step": step,
            "loss": 3 + 8 * 0.8**step,
            "grad_norm": 1.0,
            "lr": 1e-3,
            "tokens_per_s": 5e4,
            "step_s": 0.1,
        }
        rows.append(row | changed.get(f"step_{step}", {}))
    return rows


def drawn(folder, log, resumed=()):
    path = write_run(folder, simulate("sliced", [0, 1], 6), [0, 1], "sliced", log)
    starts = [
        {"command": [], "started": "2026-01-01T00:00:00", "ranks": 2, "resumed_step": at} for at in (None, *resumed)
    ]
    config = json.loads((path / "config.json").read_text()) | starts[-1] | {"earlier": starts[:-1], "ranks": None}
    (path / "config.json").write_text(json.dumps(config))
    (measured,) = measure_runs([read_run(path)], own_schedule)
    return whole_run.draw(measured)


def panels(figure):
    return {axes.get_ylabel().replace("\n", " "): axes for axes in figure.axes}


def test_each_quantity_of_the_log_has_a_panel_and_what_is_used_up_begins_at_zero(tmp_path):
    log = log_of(60, step_1={"peak_memory_bytes": 1e9}, step_30={"peak_memory_bytes": 2e9, "val_loss": 3.1})
    figure = drawn(tmp_path / "run", log)
    assert is_inside(figure)
    found = panels(figure)
    assert list(found) == ["loss (nats)", "learning rate", "gradient norm", "tokens/s", "memory of a rank (GB)"]
    for name in ("learning rate", "tokens/s", "memory of a rank (GB)"):
        assert found[name].get_ylim()[0] == 0
    memory = found["memory of a rank (GB)"].lines[0].get_ydata()
    assert memory.tolist() == [1.0] * 29 + [2.0] * 31, "it holds until it is noted again"
    assert [line.get_xydata().tolist() for line in found["loss (nats)"].lines if line.get_label() == "validation"] == [
        [[30, 3.1]]
    ]


def test_a_loss_that_falls_at_once_leaves_room_for_the_rest(tmp_path):
    axes = drawn(tmp_path / "run", log_of(400)).axes[0]
    assert axes.get_ylim()[1] < 3.5
    assert [text.get_text() for text in axes.texts] == ["begins at 9.4"]
    assert is_inside(drawn(tmp_path / "short", log_of(3)))
    assert is_inside(drawn(tmp_path / "one", log_of(1)))


def test_restarts_are_marked_behind_the_step_they_go_on_from(tmp_path):
    figure = drawn(tmp_path / "run", log_of(60), resumed=(20, 45, 60))
    for axes in figure.axes:
        at = [line.get_xdata()[0] for line in axes.lines if len(line.get_xdata()) == 2 and line.get_linestyle() == "--"]
        assert at == [20.5, 45.5], "of the third start there are no steps yet"
    assert [text.get_text() for text in figure.axes[0].texts].count("restart") == 1
    assert "resumed 2 times\nrestarts after step 20, 45" in top_of(figure)
    assert is_inside(figure)


def test_a_start_by_itself_has_no_restart(tmp_path):
    figure = drawn(tmp_path / "run", log_of(60)[30:], resumed=(20, 30))
    assert top_of(figure).splitlines()[0] == "sliced: steps 31 to 60"


def test_what_changes_at_a_restart_does_not_change_before_it(tmp_path):
    log = log_of(60, **{f"step_{step}": {"tokens_per_s": 1e4} for step in range(41, 61)})
    axes = panels(drawn(tmp_path / "run", log, resumed=(20, 40)))["tokens/s"]
    smoothed = axes.lines[1].get_ydata()
    assert smoothed.tolist() == [5e4] * 40 + [1e4] * 20
    assert whole_run.smooth_between(np.arange(1, 4), np.ones(3), ()).tolist() == [1, 1, 1]
    assert whole_run.smooth_between(np.arange(5, 8), np.ones(3), (2, 2, 9)).tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("resumed", "expected"),
    [
        ((), {}),
        ((20, 40), {20: 1, 40: 1}),
        ((20, 20, 40), {20: 2, 40: 1}),  # no checkpoint came of the second start
        ((20, 40, 30), {20: 1, 30: 1}),  # from an older checkpoint: what the third start made is made anew
    ],
)
def test_a_start_of_which_no_step_is_left_is_not_marked(resumed, expected):
    *earlier, last = [{"resumed_step": step} for step in (None, *resumed)]
    assert restarts_of(last | {"earlier": earlier}) == expected
    assert restarts_of({}) == {}


def test_skipped_updates_are_crosses_and_no_part_of_the_mean(tmp_path):
    figure = drawn(tmp_path / "run", log_of(60, step_30={"grad_norm": 80.0, "skipped": True}))
    axes = panels(figure)["gradient norm"]
    crosses = [line.get_xydata().tolist() for line in axes.lines if line.get_marker() == "x"]
    assert crosses[0] == [[30, 80]]
    means = np.concatenate([line.get_ydata() for line in axes.lines if line.get_marker() != "x"])
    assert means.max() == 1
    assert axes.get_yscale() == "log"
    assert "1 update skipped" in top_of(figure)


def test_long_runs_are_drawn_in_columns_that_lose_no_extreme():
    values = np.ones(100_003)
    values[77_777], values[5] = 9, -4
    at, least, mean, most = whole_run.in_columns(np.arange(100_003), values)
    assert len(at) <= whole_run.MOST_COLUMNS
    assert (least.min(), most.max()) == (-4, 9)
    counts = np.diff([*np.unique(np.linspace(0, 100_003, len(at), endpoint=False).astype(int)), 100_003])
    assert (mean * counts).sum() == pytest.approx(values.sum())


def test_memory_is_noted_at_the_start_and_where_it_has_grown():
    records = StepRecords(10, 1.0, PeakRate(None, "unknown"), [0, 0])
    noted = []
    for step, sizes in enumerate(([3e9, 5e9], [3e9, 5.04e9], [6e9, 5e9]), start=1):
        meeting = RankReports(1.0, [], [], [0, 0], [1, 1], [1, 1], 0, [], memory_bytes=sizes)
        record = records.of_step(step, meeting, 1.0, 1e-3, 1.0, False)
        assert "gpu_memory_bytes" not in record
        noted.append(record.get("peak_memory_bytes"))
    assert noted == [5e9, None, 6e9]


def test_a_gpu_is_asked_for_its_memory_now_and_then():
    asked = []
    device = SimpleNamespace(used_bytes=lambda: asked.append(len(told)) or 1000 * len(asked))
    point, told = MeetingPoint(None, None, [], None, None, None, device), []
    for _ in range(40):
        told.append(point.memory()[1])
    assert asked == [0, 16, 32]
    assert told == [1000] * 16 + [2000] * 16 + [3000] * 8
    assert MeetingPoint(None, None, [], None, None, None).memory()[1] == 0


def test_each_start_s_steps_ranks_and_seconds():
    """The second start made steps 4 to 9, of which the third, from step 6 on, left two; the fourth began there, too."""
    earlier = [{"resumed_step": None, "ranks": 2}, {"resumed_step": 3, "ranks": 4}, {"resumed_step": 5, "ranks": 3}]
    config = {"earlier": earlier, "resumed_step": 5, "ranks": [{}]}
    log = [{"step": step, "step_s": seconds} for step, seconds in enumerate([9, 9, 1, 8, 2, 9, 9, 3, 4, 5], 1)]
    assert starts_of(config, log) == [
        {"start": 1, "first": 1, "last": 3, "ranks": 2, "step_s": 1},
        {"start": 2, "first": 4, "last": 5, "ranks": 4, "step_s": 5},
        {"start": 4, "first": 6, "last": 10, "ranks": 1, "step_s": 4},
    ]
    taken_back = config | {"earlier": [earlier[0], {"resumed_step": 7, "ranks": 4}], "resumed_step": 3}
    found = [(one["start"], one["first"], one["last"], one["ranks"]) for one in starts_of(taken_back, log)]
    assert found == [(1, 1, 3, 2), (3, 4, 10, 1)], "from an older checkpoint: nothing is left of the second start"
    (row,) = starts_of({"ranks": [{}, {}]}, [{"step": 7}])
    assert row == {"start": 1, "first": 7, "last": 7, "ranks": 2, "step_s": None}
    assert start_text(row | {"headline": None}) == "1: steps 7 to 7 on 2 ranks: no usable traces"
