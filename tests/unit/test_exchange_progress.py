"""Progress lines of bench_exchange.py, and the JSON of a benchmark that is not finished."""

import json

import pytest

from gpt2.errors import UserError
from scripts.bench.report import KEEP_S, ReportFile
from scripts.exchange_bench.exchange_progress import ExchangeProgress

pytestmark = pytest.mark.any_mpi


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def test_the_contender_that_runs_its_results_and_the_time_left(clock, capsys):
    """Two sizes, the second three times as large, of two contenders: a takes 2 s a turn, b 6 s."""
    sizes, lefts = [1_000_000, 3_000_000], []
    progress = ExchangeProgress(sizes, ["a", "b"], 2)
    for size_bytes in sizes:
        for turn in range(2):
            for name, seconds in (("a", 2.0), ("b", 6.0)):
                progress.begin_turn(size_bytes, turn, name)
                clock[0] += seconds * size_bytes / 1e6
                progress.end_turn(size_bytes, name, seconds * size_bytes / 4e6)
                lefts.append(progress.left_s())
    # After a round of both, what is left is known.
    assert [lefts[turn] for turn in (1, 3, 5, 7)] == pytest.approx([56, 48, 24, 0])
    first, second, *others = capsys.readouterr().err.splitlines()
    assert first == "1 MB, round 2 of 2, about 0:56 left: a 0.50 s, b 1.50 s; now a (1 of 2)"
    assert second == "3 MB, round 1 of 2, about 0:48 left: a 0.50 s, b 1.50 s; now a (1 of 2)"
    assert len(others) == 3, "at most a line in 5 s"


def test_the_file_is_json_at_any_moment(clock, tmp_path):
    path, report = tmp_path / "exchange.json", {"sizes": []}
    file = ReportFile(path)
    file.keep(report)
    assert json.loads(path.read_text()) == {"sizes": []}
    report["sizes"].append(1)
    clock[0] += KEEP_S / 2
    file.keep(report)
    assert json.loads(path.read_text())["sizes"] == [], "not at every exchange"
    clock[0] += KEEP_S
    file.keep(report)
    assert json.loads(path.read_text()) == {"sizes": [1]}
    file.write({"sizes": [2]})
    assert json.loads(path.read_text()) == {"sizes": [2]}
    assert [one.name for one in tmp_path.iterdir()] == ["exchange.json"], "written beside it, and renamed"
    ReportFile(None).keep(report)


def test_a_disk_that_cannot_be_written_ends_no_measurement(clock, tmp_path, capsys):
    file = ReportFile(tmp_path / "gone" / "exchange.json")
    for _ in range(3):
        clock[0] += 10
        file.keep({})
    assert capsys.readouterr().err.count("measuring continues") == 1
    with pytest.raises(UserError):
        file.write({})
