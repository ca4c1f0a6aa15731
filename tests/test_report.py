"""scripts/report.py: which rank the progress line names as the slowest."""

import sys
from math import nan
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))

from report import Progress, slowest

RECORD = {"loss": 1, "grad_norm": 1, "lr": 1, "step_s": 1, "tokens_per_s": 1, "exposed_exchange_s": 0, "val_loss": 1}


@pytest.mark.parametrize(
    ("seconds", "rank", "excess"),
    [([1, 1.5], 1, 0.5), ([2, 4, 2.5, 3], 1, 0.6), ([nan, 1, 3, 1], 2, 2), ([0, 0, 0], 0, 0)],
)
def test_slowest_against_the_median_of_the_others(seconds, rank, excess):
    assert slowest(seconds) == {"slowest_rank": rank, "slowest_excess": pytest.approx(excess)}


@pytest.mark.parametrize("seconds", [[1.0], [nan, 1.0]])
def test_one_rank_alone_is_not_slow(seconds):
    assert slowest(seconds) == {}


def lines(*steps):
    """A line a step, from step 1 on."""
    printed = []
    progress = Progress(99, printed.append, [{"host": f"cn{rank}"} for rank in range(3)])
    for step, compute_s in enumerate(steps, start=1):
        progress.step(RECORD | {"step": step}, compute_s)
    return printed


def test_a_rank_is_named_where_it_stands_out():
    usual, slow = [1.0, 1.0, 1.1], [1.0, 1.0, 1.3]
    printed = lines(slow, slow, usual, slow, usual)
    assert ["slowest" in line for line in printed] == [False, False, False, True, False], "not while warming up either"
    assert "slowest rank 2 (cn2) +30%" in printed[3]


def test_one_hiccup_between_two_lines_names_nobody(monkeypatch):
    printed = []
    monkeypatch.setattr("time.monotonic", lambda: 100.0)
    progress = Progress(99, printed.append, [{"host": "a"}, {"host": "b"}])
    for step in range(3, 13):
        record = RECORD | {"step": step}
        if step < 12:
            del record["val_loss"]
        progress.step(record, [1.0, 9.0 if step == 5 else 1.0])
    assert len(printed) == 2, "the first step given, and the validated one"
    assert "slowest" not in printed[1]
