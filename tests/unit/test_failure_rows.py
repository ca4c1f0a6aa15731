"""What failure_suite.py and random_kills.py say of rows and runs that are as expected, and of others."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.makers.pages import faults as page
from tests.suites import failure_train, random_kills
from tests.suites.faults import job, outcome
from tests.suites.faults.case import ENDS, GOES_ON, MISTAKE, TO_THE_END, Case
from tests.suites.faults.job import Failed
from tests.suites.faults.processes import processes_of, rank_processes, send, wait_until
from tests.suites.faults.suite import RowsFile, take_fault

pytestmark = pytest.mark.any_mpi
ENDED = {
    "ended": True, "seconds": 1.0, "gone_s": 1.0, "code": 2, "survivors": [], "went_on": False, "last_step": 35,
    "began": True, "skipped": [], "stale": False, "second": None, "found": [], "left_over": [], "launcher": "mpirun",
    "said": "error: no room on node1", "resumed_code": 0, "resumed_from": 30, "same": True,
    "start_s": 2.0,
}  # fmt: skip
WENT_ON = ENDED | {"went_on": True, "code": 0, "last_step": 100, "resumed_from": 100}
REFUSED = {"ended": True, "seconds": 2.0, "code": 2, "message": "error: pid 7"}
MISTAKEN = Case("", ENDS, code=MISTAKE, line="error: .*node1")
SUPERVISED = Case("", GOES_ON, supervised=True, line="start again")
SECOND = Case("", GOES_ON, second=MISTAKE, line="pid 7")


def judged(row: dict, case: Case) -> dict:
    row = row | {"wrong": outcome.judge(row, case)}
    return row | {"outcome": outcome.outcome(row)}


@pytest.mark.parametrize(
    ("row", "case", "words"),
    [
        (ENDED, MISTAKEN, "1.0 s, code 2, 5 lost"),
        (WENT_ON, Case("", GOES_ON), "goes on"),
        (WENT_ON | {"starts": 2, "said": "they start again"}, SUPERVISED, "goes on, 1 restart"),
        (WENT_ON | {"starts": 4, "said": "they start again"}, SUPERVISED, "goes on, 3 restarts"),
        (WENT_ON | {"second": REFUSED, "said": "error: pid 7"}, SECOND, "goes on, the second: 2.0 s, code 2"),
        (WENT_ON | {"code": 2}, Case("", TO_THE_END, code=2), "goes on to the end, code 2, 0 lost"),
        (ENDED | {"last_step": 0, "began": False, "seconds": 6.0}, MISTAKEN, "6.0 s, code 2, not begun"),
        (ENDED | {"seconds": 17.0, "code": 137}, Case("", by_launcher=True), "**17.0 s**, code 137, 5 lost"),
        (ENDED | {"resumed_code": 2, "same": False}, Case("", resumed=2), "1.0 s, code 2, not resumed: code 2"),
    ],
)
def test_what_is_as_expected(row, case, words):
    found = judged(row, case)
    assert (found["wrong"], found["outcome"]) == ([], words)


@pytest.mark.parametrize(
    ("changed", "case", "word"),
    [
        (WENT_ON, MISTAKEN, "expected: ends"),
        ({"seconds": 6.0}, MISTAKEN, "later than 5.0 s"),
        ({"seconds": 8.0, "began": False, "last_step": 0}, MISTAKEN, "later than 7.0 s"),
        (WENT_ON | {"second": REFUSED | {"seconds": 8.0}, "said": "error: pid 7"}, SECOND, "later than 7.0 s"),
        ({"code": 1}, MISTAKEN, "expected code 2"),
        ({"code": 0}, MISTAKEN, "code 0"),
        ({"said": ""}, MISTAKEN, "no line"),
        ({"said": "error: no room on node0"}, MISTAKEN, "another line"),
        ({"ended": False}, MISTAKEN, "does not end"),
        ({"survivors": [1]}, MISTAKEN, "rank 1 stays"),
        ({"left_over": ["checkpoints/step-00000040.part"]}, MISTAKEN, "checkpoints/step-00000040.part stays"),
        ({"found": ["the notes are gone"]}, MISTAKEN, "the notes are gone"),
        ({"stale": True}, MISTAKEN, "summary.json says that it is done"),
        ({"same": False}, MISTAKEN, "resumed with other losses"),
        ({"resumed_code": 2}, MISTAKEN, "expected code 0 when resumed"),
        ({"resumed_code": None}, MISTAKEN, "resumed, it does not end"),
        ({}, Case("", GOES_ON), "expected to go on"),
        (WENT_ON | {"same": False}, Case("", GOES_ON), "other losses"),
        (WENT_ON | {"starts": 1, "said": "they start again"}, SUPERVISED, "no restart"),
        (WENT_ON | {"second": REFUSED | {"code": 0}}, SECOND, "expected code 2 of the second"),
        (WENT_ON | {"second": REFUSED | {"ended": False}}, SECOND, "the second: "),
        ({"same": False}, Case("", by_launcher=True), "resumed with other losses"),
    ],
)
def test_what_is_not_as_expected_is_bold(changed, case, word):
    found = judged(ENDED | changed, case)
    assert found["wrong"]
    assert "**" in found["outcome"]
    assert word in found["outcome"]


def test_cases_with_one_outcome_under_all_launchers_share_a_line():
    made = {name: {"processor": "a CPU", "cores": 2} for name in ("mpirun (MPICH)", "srun (pmi2)")}
    rows = [{"case": case, "says": case, "launcher": name, "outcome": outcome if "srun" in name else "goes on"}
            for case, outcome in (("USR1", "goes on"), ("USR2", "code 75"), ("a cut", "goes on"), ("variant", "code 2"))
            for name in made]  # fmt: skip
    block = page.failures_block({"rows": rows, "made_on": made, "summary": "All is well."}, ["variant"])
    assert '* Under every launcher "goes on": USR1; a cut.\n' in block
    assert "| USR2 | goes on | code 75 |\n" in block
    assert "variant" not in block


class SlowToStart(random_kills.Job):
    """Its launcher starts a rank, which would stay for ever, only after a moment."""

    def command(self, ranks: int, flags: list) -> list:
        program = 'sleep 0.5; PMI_RANK=0 exec "$0" -c "import time; time.sleep(1000)" "$1"'
        return ["sh", "-c", 'sh -c "$1" "$2" "$3"; sleep 1000', "sh", program, sys.executable, self.run]


@pytest.fixture
def started(tmp_path):
    run = tmp_path / "run"
    job = SlowToStart(run, (), 1, 1)
    yield job
    send(signal.SIGKILL, job.launcher, *processes_of(run))


def test_a_job_is_killed_before_its_ranks_are_there(started):
    assert not rank_processes(started.run)
    started.kill()
    assert started.ended()
    assert not wait_until(lambda: processes_of(started.run), 1)


@pytest.mark.parametrize("has_ranks", [False, True])
def test_what_outlives_a_kill_is_named(started, monkeypatch, has_ranks):
    monkeypatch.setattr(job, "END_LIMIT_S", 0.01)
    if has_ranks:
        wait_until(lambda: rank_processes(started.run), 10)
    left = rank_processes(started.run) if has_ranks else "the launcher"
    with pytest.raises(Failed, match=re.escape(f"there still are {left}")):
        started.wait_until_gone()


@pytest.mark.parametrize("fault", ["no-such:1:2", "raise", "raise:1", "raise:1:x", "raise:1:2:3", ""])
def test_an_unknown_fault_is_one_line(fault, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["failure_train.py", fault])
    with pytest.raises(SystemExit) as ended:
        take_fault(failure_train.FAULTS, "FAULT:R:S")
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("failure_train.py: error: ")


def test_a_known_fault_is_taken_off_the_command_line(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["failure_train.py", "raise:all:2", "--steps"])
    assert take_fault(failure_train.FAULTS, "FAULT:R:S") == ["raise", "all", "2"]
    assert sys.argv == ["failure_train.py", "--steps"]


def test_rows_of_two_machines_name_both(tmp_path):
    """Another launcher's rows keep their own."""
    path = tmp_path / "rows.json"
    file = RowsFile(path, "launcher", ("killed", "stopped"), lambda rows: f"{len(rows)} rows")
    row = {"launcher": "mpirun", "case": "killed"}
    first, second = {"processor": "A", "cores": 2}, {"processor": "B", "cores": 2, "mpi": "M"}
    file.put(row, "mpirun", first)
    file.put(row | {"case": "stopped"}, "mpirun", first)
    file.put(row | {"launcher": "srun"}, "srun", second)
    file.put(row | {"outcome": "new"}, "mpirun", second)
    both = {"processor": "A and B", "cores": 2, "mpi": "M"}
    assert json.loads(path.read_text())["made_on"] == {"mpirun": both, "srun": second}
    file.put(row | {"outcome": "newer"}, "mpirun", second)
    assert json.loads(path.read_text())["made_on"]["mpirun"] == both
    assert [row.get("outcome") for row in json.loads(path.read_text())["rows"]] == ["newer", None, None]


@pytest.mark.parametrize("name", ["check_skips", "failure_train", "faulty_train", "pipeline_figure"])
def test_help_starts_nothing(name, tmp_path):
    """Of the programs that take what they are given without argparse's flags, or need packages that may lack."""
    program = Path(random_kills.__file__).with_name(f"{name}.py")
    result = subprocess.run([sys.executable, program, "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert f"{name}.py" in result.stdout
    assert not list(tmp_path.iterdir()), "pipeline_figure.py drew its figure into a file called --help"


def test_a_rank_that_has_forked_is_its_first_process(tmp_path):
    """The other one looks alike until it runs its own program; a signal to it is none to the rank."""
    program = "import os, sys; os.fork(); os.write(1, b'forked\\n'); sys.stdin.read()"
    command = [sys.executable, "-c", program, str(tmp_path)]
    pipe, environment = subprocess.PIPE, {**os.environ, "PMI_RANK": "3"}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as rank:
        assert [rank.stdout.readline() for _ in range(2)] == ["forked\n"] * 2
        assert len(processes_of(tmp_path)) == 2
        assert rank_processes(tmp_path) == {3: rank.pid}
        rank.stdin.close()
