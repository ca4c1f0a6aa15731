"""doctor.py as it is run: alone, under mpirun, on several hosts, where MPI is missing, and where something hangs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.suites.test_virtual_cluster import needs_cluster, run
from tests.support.launch import launch

SCRIPTS = Path(__file__).parents[2] / "scripts"
DOCTOR = str(SCRIPTS / "doctor.py")
TIME_LIMIT_S = 60
LAUNCHER_VARIABLES = ("PMI", "OMPI_", "SLURM_", "HYDI_", "PRTE_")
# On rank 1 something raises, on rank 2 the measurements cannot be imported.
SPOILED = """
import os, sys
from scripts import doctor
from scripts.machine import host
rank = os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK"))
def broken():
    raise RuntimeError("a broken /proc")
if rank == "1":
    host.memory = broken
if rank == "2":
    sys.modules["scripts.checkup.together"] = None
sys.argv = ["doctor.py", "--json", "--expect-ranks", "4"]
doctor.main()
"""
# Executed by `alone`: {lines} spoil something before doctor.py begins.
CHANGED = """
import sys
{lines}
from scripts import doctor
sys.argv = ["doctor.py", *{words!r}]
doctor.main()
"""


def start(*words: str, lines: str = "pass", **variables: str) -> subprocess.Popen:
    """doctor.py with these words, not under a launcher, with these variables; `lines` are executed before it."""
    program = CHANGED.format(lines=lines, words=words)
    kept = {name: text for name, text in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", program], env=kept | variables, stdout=pipe, stderr=pipe, text=True)


def ended(process: subprocess.Popen) -> subprocess.CompletedProcess:
    output = process.communicate(timeout=TIME_LIMIT_S)
    return subprocess.CompletedProcess(process.args, process.returncode, *output)


def check_exit_code(result, report: dict) -> None:
    """It says what the findings say: what this machine lacks is not the test's business."""
    fails = [finding for finding in report["findings"] if finding["severity"] == "will fail"]
    assert result.returncode == bool(fails), (fails, result.stderr)


def test_alone(tmp_path):
    """Text on the terminal, the same as one object in a file."""
    file = tmp_path / "doctor.json"
    result = ended(start("--json", str(file), "--model", "tiny", "--out", str(tmp_path / "runs")))
    report = json.loads(file.read_text())
    check_exit_code(result, report)
    (facts,) = report["ranks"]
    assert facts["errors"] == {}
    assert facts["run folder"]["place"] == str(tmp_path)
    assert facts["sees run folder"]
    assert facts["speed"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["doctor.json"]
    lines = result.stdout.splitlines()
    assert lines[-1] == f"verdict: {report['verdict']}"
    assert sum(line.strip().startswith("fix: ") for line in lines) == len(report["findings"])


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path):
    result = ended(start("--json", str(tmp_path / "absent" / "doctor.json"), "--limit", "0.01"))
    assert result.returncode == 2
    assert result.stdout == ""
    assert "doctor.json: No such file or directory" in result.stderr


@pytest.mark.parametrize("ranks", [1, 3])
def test_under_mpirun(ranks):
    result = launch(ranks, [sys.executable, DOCTOR, "--json"])
    report = json.loads(result.stdout)
    check_exit_code(result, report)
    assert [facts["place"]["rank"] for facts in report["ranks"]] == list(range(ranks))
    assert [facts["errors"] for facts in report["ranks"]] == [{}] * ranks
    first = report["ranks"][0]
    assert (first["place"]["size"], first["place"]["nodes"]) == (ranks, 1)
    cores = len(os.sched_getaffinity(0))
    if ranks > cores:
        assert f"{ranks} ranks share {cores} cores" in " ".join(finding["text"] for finding in report["findings"])


def test_a_rank_that_raises_and_one_that_lacks_a_package():
    """All ranks still meet; what each met is said, and nothing is measured."""
    result = launch(3, [sys.executable, "-c", SPOILED])
    report = json.loads(result.stdout)
    assert result.returncode == 1
    assert [facts["place"]["rank"] for facts in report["ranks"]] == [0, 1, 2]
    said = {finding["about"]: finding for finding in report["findings"]}
    assert "memory could not be checked on rank 1 on" in said["memory"]["text"]
    assert "a broken /proc" in said["memory"]["text"]
    assert "packages could not be checked on rank 2 on" in said["packages"]["text"]
    assert said["packages"]["severity"] == "will fail"
    assert said["launch"]["text"].startswith("3 ranks, expected 4")
    assert not any("speed" in facts for facts in report["ranks"])


def test_one_of_many_worlds_of_one():
    """What a launcher that this MPI does not know leaves, at once from each copy: one line."""
    copies = [start(**variables) for variables in ({"PMI_SIZE": "3"}, {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "3"})]
    for result in map(ended, copies):
        assert result.returncode == 1
        assert result.stdout.startswith("doctor: will fail: a world of 1 rank, but the launcher started 3 (")
        assert result.stdout.count("\n") == 1
        assert "srun --mpi=pmix" in result.stdout


def test_without_mpi_and_with_a_folder_that_cannot_be_written():
    result = ended(start("--out", "/proc/runs", lines="sys.modules['mpi4py'] = None"))
    assert result.returncode == 1, result.stderr
    assert "will fail     mpi4py does not work on rank 0 on " in result.stdout
    assert "load the site's MPI module" in result.stdout
    assert "cannot write to /proc: " in result.stdout
    assert result.stdout.splitlines()[-1].endswith("training will fail: MPI, run folder")


@pytest.mark.parametrize(
    ("hang", "says"),
    [
        ("time.sleep(60)", "not done after 0.2 s, while starting"),
        ("ctypes.PyDLL(None).sleep(60)", "Timeout (0:00:00.3"),  # keeps the interpreter's lock, as MPI_Init does
    ],
)
def test_what_hangs_ends(hang, says):
    lines = "import ctypes, time; from scripts.checkup import facts; "
    lines += f"facts.LAST_RESORT_S = 0.1; facts.TimeLimit(0.2); {hang}"
    result = ended(start(lines=lines))
    assert result.returncode == 1
    assert says in result.stderr


@needs_cluster
def test_on_hosts_of_their_own(tmp_path):
    """Their links are measured, through the port that carries them; the slow port is named.

    Rates are those that two busy cores keep up for three nodes: else it is they that are measured.
    """
    file = tmp_path / "doctor.json"
    hosts = ["--nodes", 3, "--ranks", 3, "--rate", "200mbit", "--slow", "node1:out:25mbit"]
    for _ in range(3):  # other work on this machine may slow another port, but not each time
        result = run("run", *hosts, command=[sys.executable, DOCTOR, "--json", str(file), "--out", str(tmp_path)])
        report = json.loads(file.read_text())
        check_exit_code(result, report)
        named = [finding["text"].partition(" at ")[0] for finding in report["findings"]]
        slow = [text for text in named if text.endswith(("sends", "receives"))]
        if slow == ["node1 sends"]:
            break
    assert [facts["place"]["host"] for facts in report["ranks"]] == ["node0", "node1", "node2"]
    assert all(facts["sees run folder"] for facts in report["ranks"])
    for facts in report["ranks"]:
        assert facts["traffic"]["eth0"] > 1e6
        assert 0 < facts["link"]["latency_s"] < 1
    assert slow == ["node1 sends"]
