"""scripts/training/step_records.py: which rank the progress line names as the slowest, and what share is exchange."""

from math import nan

import pytest

from scripts.machine.host import job_end
from scripts.training.meeting import RankReports
from scripts.training.step_records import Pace, ProgressLines, exposed_exchange_s, slowest

RECORD = {"loss": 1, "grad_norm": 1, "lr": 1, "step_s": 1, "tokens_per_s": 1, "exposed_exchange_s": 0, "skipped": True}


@pytest.mark.parametrize(
    ("seconds", "stages", "slow"),
    [
        ([1, 1.5], [0, 0], (1, 0.5)),
        ([2, 4, 2.5, 3], [0] * 4, (1, 0.6)),
        ([nan, 1, 3, 1], [0] * 4, (2, 2)),
        ([0, 0, 0], [0] * 3, (0, 0)),
        # A long stage is not slow.
        ([1, 5, 1.5, 5.5], [0, 1, 0, 1], (2, 0.5)),
        ([1, 5, 1, 9], [0, 1, 0, 1], (3, 0.8)),
        ([2, 9, 1], [0, 1, 0], (0, 1.0)),
        # Nor is a rank alone.
        ([1, 5, 9], [0, 1, 2], None),
        ([1.0], [0], None),
        ([nan, 1.0], [0, 0], None),
    ],
)
def test_slowest_against_the_median_of_the_others_of_its_stage(seconds, stages, slow):
    found = slowest(seconds, stages)
    assert found == ({"slowest_rank": slow[0], "slowest_excess": pytest.approx(slow[1])} if slow else {})


@pytest.mark.parametrize(
    ("exchange_s", "step_s", "compute_s", "expected"),
    [
        ([2.0, 3.0], [9.9, 9.8], [1, 1], 2.5),
        ([0.0, 2.0, 3.0], [0.0, 9.9, 9.8], [nan, 1, 1], 2.5),  # a server is no worker
        ([2.0, 16.0], [9.9, 19.0], [1, 1], 4.5),  # rank 1 has waited for 9 s until rank 0 began
        ([9.0, 28.0], [9.9, 29.0], [1, 1], 9.0),
        ([2.0, 5.0], [9.9, 19.0], [1, 1], 1.0),  # it computed meanwhile
    ],
)
def test_exchange_is_a_part_of_rank_0s_step(exchange_s, step_s, compute_s, expected):
    meeting = RankReports(1.0, [], [], exchange_s, step_s, compute_s, 0, [])
    assert exposed_exchange_s(meeting, 10.0) == pytest.approx(expected)


def lines(*steps):
    """A line a step, from step 1 on."""
    printed = []
    progress = ProgressLines(Pace(99), printed.append, [{"host": f"cn{rank}"} for rank in range(3)], [0, 0, 0])
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
    progress = ProgressLines(Pace(99), printed.append, [{"host": "a"}, {"host": "b"}], [0, 0])
    for step in range(3, 13):
        record = RECORD | {"step": step}
        if step < 12:
            del record["skipped"]
        progress.step(record, [1.0, 9.0 if step == 5 else 1.0])
    assert len(printed) == 2, "the first step given, and the skipped one"
    assert "slowest" not in printed[1]


def test_lines_by_number_of_steps(monkeypatch):
    """--log-every 4: whatever the time, and beside the first and the last step."""
    printed = []
    monkeypatch.setattr("time.monotonic", lambda: 100.0)
    progress = ProgressLines(Pace(10), printed.append, [{"host": "a"}], [0], 4)
    for step in range(1, 11):
        progress.step({name: value for name, value in RECORD.items() if name != "skipped"} | {"step": step}, [1.0])
    assert [int(line.split()[1].partition("/")[0]) for line in printed] == [1, 4, 8, 10]


def test_what_is_left_and_the_jobs_limit(monkeypatch):
    """Ten steps of 100 s behind two slow ones: the slow ones count as passed, and not for the rest."""
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr("time.time", lambda: 5000 + clock[0])
    known, late = Pace(20), Pace(20, job_end=5000 + 2000.0)
    said = []
    for step in range(9, 21):  # a run that was taken up again
        clock[0] += 500 if step < 11 else 100
        said.append((known.text(step), late.text(step)))
    assert said[0] == ("8:20", "8:20, job's limit in 25:00")
    assert said[2] == ("18:20, 15:00 left", "18:20, 15:00 left")
    assert said[-1] == ("33:20", "33:20")
    late = Pace(200, job_end=5000 + clock[0] + 3600.0)
    for step in (1, 2, 3):
        clock[0] += 100
        text = late.text(step)
    assert text == "5:00, 5:28:20 left, ends 5 h after the job's limit"
    assert Pace(9).text(1) == "0:00"
    for limit_s, left in ((50.0, "0:50"), (9000.0, "1:40")):
        limited = Pace(4, left_s=lambda limit_s=limit_s: limit_s)
        for step in (1, 2, 3):
            clock[0] += 100
            text = limited.text(step)
        assert text == f"5:00, {left} left", "by time or by steps, whatever comes first"


def test_the_jobs_limit_as_slurm_says_it():
    assert job_end({"SLURM_JOB_END_TIME": "1795608000"}) == 1795608000.0
    for text in ("", "UNLIMITED", "0", "18446744073709551615", "-1"):
        assert job_end({"SLURM_JOB_END_TIME": text}) is None
    assert job_end({}) is None


def test_a_line_fits_into_120_columns():
    """Of a long run at full speed; the validation has a line of its own."""
    printed = []
    progress = ProgressLines(Pace(10_000), printed.append, [{"host": "a"}], [0])
    record = {"loss": 10.98765, "grad_norm": 2.3456, "lr": 6e-4, "step_s": 5.25437, "tokens_per_s": 123456.7}
    progress.step(record | {"step": 1, "exposed_exchange_s": 0.6, "mfu": 0.4567, "val_loss": 3.68271}, [1.0])
    assert printed == [
        "step     1/10000  loss 10.988  norm 2.35  lr 6.0e-04  5254 ms  123,457 tok/s  MFU 46%  exchange 11%  0:00",
        "                  val loss 3.6827",
    ]
    progress.step(record | {"step": 10_000, "exposed_exchange_s": 0.6, "mfu": 0.04567}, [1.0])
    progress.step(record | {"step": 10_000, "exposed_exchange_s": 0.6}, [1.0])
    assert "  MFU 4.6%  " in printed[2]
    assert "MFU" not in printed[3]
    assert all(len(line) <= 120 for line in printed)
    diverged = {"loss": float("nan"), "grad_norm": float("nan"), "step": 1, "exposed_exchange_s": 0}
    progress.step(record | diverged, [1.0])
    assert "  loss nan  norm nan  " in printed[-1], "before the run ends with a line on it"
