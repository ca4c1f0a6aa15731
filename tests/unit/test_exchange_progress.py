"""scripts/exchange_bench/progress.py: what is said while exchanges are measured, and the JSON so far."""

import json

import pytest

from gpt2.errors import UserError
from scripts.exchange_bench.progress import KEEP_S, KeptReport, Progress

pytestmark = pytest.mark.any_mpi


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def test_what_runs_what_came_out_and_what_is_left(clock):
    """Two sizes, the second three times as large, of two contenders: a takes 2 s a turn, b 6 s."""
    said, lefts = [], []
    progress = Progress([1_000_000, 3_000_000], 2, said.append)
    for larger in (1, 3):
        progress.begin_size("ab")
        for round_number in range(2):
            for name, seconds in (("a", 2.0), ("b", 6.0)):
                lefts.append(progress.left_s())
                progress.begins(name, round_number)
                clock[0] += seconds * larger
                progress.ends(name, [{"seconds": seconds * larger / 4}])
    # After a alone, b is taken for as long: 2 + 4 turns of 2 s here less the one made, and 3 times 4 there.
    assert lefts[:4] == [None, 6 + 3 * 8, 8 + 3 * 16, 6 + 3 * 16]
    assert lefts[4:] == [48, 42, 24, 18]
    assert progress.left_s() == 0
    assert said[0] == "1 MB, round 2 of 2, about 0:56 left: a 0.50 s, b 1.50 s; now a (1 of 2)"
    assert said[1] == "3 MB, round 1 of 2, about 0:48 left: a 0.50 s, b 1.50 s; now a (1 of 2)"
    assert len(said) == 5, "at most a line in 5 s"


def test_the_file_is_json_at_any_moment_and_says_whether_it_is_complete(clock, tmp_path):
    path, report = tmp_path / "exchange.json", {"sizes": []}
    kept = KeptReport(path, report)
    kept.keep()
    assert json.loads(path.read_text()) == {"sizes": [], "complete": False}
    report["sizes"].append(1)
    clock[0] += KEEP_S / 2
    kept.keep()
    assert json.loads(path.read_text())["sizes"] == [], "not at every exchange"
    clock[0] += KEEP_S
    kept.keep()
    assert json.loads(path.read_text()) == {"sizes": [1], "complete": False}
    kept.complete()
    assert json.loads(path.read_text()) == {"sizes": [1], "complete": True}
    assert [one.name for one in tmp_path.iterdir()] == ["exchange.json"], "written beside it, and renamed"
    KeptReport(None, report).keep()


def test_a_disk_that_cannot_be_written_ends_no_measurement(clock, tmp_path, capsys):
    kept = KeptReport(tmp_path / "gone" / "exchange.json", {})
    for _ in range(3):
        clock[0] += 10
        kept.keep()
    assert capsys.readouterr().err.count("measuring goes on") == 1
    with pytest.raises(UserError):
        kept.complete()
