"""scripts/slurm/train.sbatch without a SLURM: what it makes of the ways a training ends; its launcher is a stand-in.

tests/suites/test_slurm.py runs the same scripts on a real SLURM.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts import job

pytestmark = pytest.mark.any_mpi

SCRIPT = Path(__file__).parents[2] / "scripts" / "slurm" / "train.sbatch"
SWEEP = SCRIPT.with_name("sweep.sbatch")
TIME_LIMIT_S = 30
# The launcher: its first word, then the shell commands that are to happen, then the command line it was given.
STAND_IN = """#!/bin/bash
case $1 in --exclude=*) echo "$1" > excluded; shift 2;; esac
plan=$1; shift
echo "$@" > launched
run=runs/one
checkpoint() { mkdir -p "$run/checkpoints/step-$1"; touch "$run/checkpoints/step-$1/checkpoint.json"; }
wait_for_signal() { touch ready; while [ -z "$got" ]; do sleep 0.05; done; echo "$got" > got; }
got=''
trap 'got=USR2' USR2
trap 'got=TERM' TERM
eval "$plan"
"""
JOB = {
    "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "4",
    "SLURM_CPUS_PER_TASK": "3",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """Where a job runs: the stand-in, a scontrol that writes down what it is asked for, and a squeue without answer."""
    write_program(tmp_path / "launcher", STAND_IN)
    write_program(tmp_path / "bin" / "squeue", "#!/bin/bash\nexit 1\n")
    write_program(tmp_path / "bin" / "scontrol", '#!/bin/bash\necho "$@" > asked\n')
    return tmp_path


def write_program(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def start(
    folder, plan, *flags, end_signal="USR2", restarts=0, spare=0, python="PYTHON", launcher="./launcher", **environment
) -> subprocess.Popen:
    """The script, its block filled in as a site would, as SLURM starts it."""
    lines = SCRIPT.read_text()
    for name, line in {
        "python": f"python={python}",
        "restarts": f"restarts={restarts}",
        "spare": f"spare={spare}",
        "launch": f"launch=({launcher} '{plan}') end_signal={end_signal}",
    }.items():
        lines, count = re.subn(rf"^{name}=.*$", lambda match, line=line: line, lines, flags=re.MULTILINE)
        assert count == 1
    (folder / "train.sbatch").write_text(lines)
    clean = {name: text for name, text in os.environ.items() if not name.startswith("SLURM_")}
    return subprocess.Popen(
        ["bash", "train.sbatch", "runs/one", *flags],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=clean | JOB | {"PATH": f"{folder}/bin:{os.environ['PATH']}"} | environment,
    )  # fmt: skip


def end_of(process):
    """(exit code, output)"""
    output, _ = process.communicate(timeout=TIME_LIMIT_S)
    return process.returncode, output


def asked(folder):
    """What SLURM was asked for."""
    file = folder / "asked"
    return file.read_text().strip() if file.exists() else None


def wait_until_ready(folder):
    deadline = time.monotonic() + TIME_LIMIT_S
    while not (folder / "ready").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_launch_line(folder):
    plan = "echo threads $OMP_NUM_THREADS $SRUN_CPUS_PER_TASK; mkdir -p $run; touch $run/summary.json"
    code, output = end_of(start(folder, plan, "--text", "a b.txt"))
    assert code == 0, output
    expected = "PYTHON scripts/train.py --expect-ranks 4 --out runs/one --resume --text a b.txt"
    assert (folder / "launched").read_text().strip() == expected
    assert "threads 3 3" in output
    assert asked(folder) is None


def test_ranks_that_fail_start_again_within_the_job(folder):
    """By --restarts of train.py; on as many nodes as are no spare ones, without the one that SLURM has lost."""
    (folder / "scripts").symlink_to(SCRIPT.parents[1])
    write_program(folder / "bin" / "sinfo", "#!/bin/bash\n[ ! -e failed ] || echo node0\n")
    (folder / "launcher").rename(folder / "bin" / "srun")
    plan = "if [ -e failed ]; then touch $run/summary.json; else touch failed; checkpoint 00000004; exit 9; fi; "
    process = start(
        folder, plan, restarts=2, spare=1, python=sys.executable, launcher="srun", PYTHONPATH=str(SCRIPT.parents[2])
    )
    code, output = end_of(process)
    assert code == 0, output
    assert "they start again in 5 s, from the checkpoint of step 4" in output
    assert (folder / "excluded").read_text().strip() == "--exclude=node0"
    assert (folder / "launched").read_text().split()[:2] == ["--nodes=1", "--ntasks=2"]
    assert "--expect-ranks 2 --out runs/one --resume" in (folder / "launched").read_text()


@pytest.mark.parametrize(
    ("said", "environment", "end"),
    [
        ("2026-01-31T12:00:00", {"TZ": "UTC"}, "1769860800"),
        ("2026-01-31T12:00:00", {"SLURM_JOB_END_TIME": "5"}, "5"),
        ("N/A", {}, ""),
        ("", {}, ""),
    ],
)
def test_the_time_limit_is_told_to_the_ranks(folder, said, environment, end):
    """By SLURM where it does, else by squeue's word; a job without a limit has none."""
    write_program(folder / "bin" / "squeue", f"#!/bin/bash\necho {said}\n")
    _, output = end_of(start(folder, 'echo "end=$SLURM_JOB_END_TIME."', **environment))
    assert f"end={end}." in output


@pytest.mark.parametrize(
    ("plan", "code", "wanted", "says"),
    [
        ("mkdir -p $run; touch $run/summary.json", 0, None, "ended with exit code 0"),
        ("exit 0", 1, None, "this start left no runs/one/summary.json"),
        ("checkpoint 00000008.part; exit 75", 1, None, "interrupted without a new checkpoint"),
        ("checkpoint 00000004; exit 9", 9, None, "ended with exit code 9"),
        ("exit 2", 2, None, "ended with exit code 2"),
        ("checkpoint 00000004; exit 75", 75, "requeue 7", "go on from runs/one/checkpoints/step-00000004/"),
        ("exit 75", 1, None, "interrupted without a new checkpoint"),
    ],
)  # fmt: skip
def test_each_end(folder, plan, code, wanted, says):
    found, output = end_of(start(folder, plan))
    assert found == code, output
    assert says in output
    assert asked(folder) == wanted


def test_no_step_since_the_checkpoint_ends_the_circle(folder):
    """A job that begins from a checkpoint and is interrupted before another would go on queueing for ever."""
    (folder / "runs/one/checkpoints/step-00000004").mkdir(parents=True)
    (folder / "runs/one/checkpoints/step-00000004/checkpoint.json").touch()
    code, output = end_of(start(folder, "exit 75"))
    assert code == 1, output
    assert ", from runs/one/checkpoints/step-00000004/" in output
    assert asked(folder) is None


def test_the_summary_of_an_earlier_start_does_not_count(folder):
    """Open MPI's launcher has been seen to report 0 when its daemons were killed."""
    (folder / "runs/one").mkdir(parents=True)
    (folder / "runs/one/summary.json").touch()
    code, output = end_of(start(folder, "exit 0"))
    assert code == 1, output
    assert (folder / "runs/one/summary.json").exists(), "a start that makes no step takes nothing away"


def test_a_task_of_an_array_queues_itself_alone(folder):
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}
    code, output = end_of(start(folder, "checkpoint 00000004; exit 75", **array))
    assert (code, asked(folder)) == (75, "requeue 7_2"), output


@pytest.mark.parametrize("end_signal", ["USR2", "TERM"])
def test_near_the_limit(folder, end_signal):
    """SLURM's USR1 to the script becomes the launcher's own signal; the checkpoint takes its time."""
    process = start(folder, "wait_for_signal; sleep 0.5; checkpoint 00000004; exit 75", end_signal=end_signal)
    wait_until_ready(folder)
    process.send_signal(signal.SIGUSR1)
    code, output = end_of(process)
    assert (folder / "got").read_text().strip() == end_signal
    assert (code, asked(folder)) == (75, "requeue 7"), output
    assert "the time limit is near" in output


def test_the_limit_itself_comes_while_the_checkpoint_is_written(folder):
    process = start(folder, "wait_for_signal; sleep 1; checkpoint 00000004; exit 75")
    wait_until_ready(folder)
    process.send_signal(signal.SIGUSR1)
    while not (folder / "got").exists():
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    code, output = end_of(process)
    assert (code, asked(folder)) == (75, "requeue 7"), output


def test_cancelled(folder):
    """Under scancel both the script and the ranks get TERM. To queue the job again would undo what the user did."""
    process = start(folder, "touch ready; sleep 1; checkpoint 00000004; exit 75")
    wait_until_ready(folder)
    process.send_signal(signal.SIGTERM)
    code, output = end_of(process)
    assert (code, asked(folder)) == (75, None), output
    assert "runs/one/checkpoints/step-00000004/checkpoint.json is there to go on from" in output


def test_no_run_folder(folder):
    process = subprocess.run(["bash", SCRIPT], cwd=folder, env=os.environ | JOB, capture_output=True, text=True)
    assert process.returncode != 0
    assert "sbatch scripts/slurm/train.sbatch RUN [FLAGS...]" in process.stderr


def test_a_run_that_has_ended_keeps_its_exit_code(tmp_path):
    """srun sends SIGTERM to the ranks that end last, when no Python handler is left: as after exec."""
    afterwards = "import os, signal, sys; os.kill(os.getpid(), signal.SIGTERM); sys.exit(75)"
    program = (
        "import os, sys\nfrom scripts.training.signals import Signals\nSignals(print).close()\n"
        f"os.execv(sys.executable, ['p', '-c', {afterwards!r}])"
    )
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parents[2])}
    assert subprocess.run([sys.executable, "-c", program], env=environment, cwd=tmp_path).returncode == 75


@pytest.mark.parametrize(
    ("version", "flags", "on"),
    [
        ("mpirun (Open MPI) 5.0.1", [], "launch=(srun --mpi=pmix --kill-on-bad-exit=1) end_signal=USR2"),
        ("HYDRA build details", [], "launch=(srun --mpi=pmi2 --kill-on-bad-exit=1) end_signal=USR2"),
        ("PRRTE 3", ["--launcher", "mpirun"], 'launch=(mpirun -n "$SLURM_NTASKS") end_signal=USR2'),
        ("HYDRA", ["--launcher", "mpirun"], 'launch=(mpirun -n "$SLURM_NTASKS") end_signal=TERM'),
        (None, [], "launch=(srun --mpi=pmix --kill-on-bad-exit=1) end_signal=USR2"),
    ],
)
def test_job_py_writes_it_for_this_python_and_its_mpi(version, flags, on, monkeypatch, capsys):
    monkeypatch.setattr(job, "tool_output", lambda *command, limit_s: version)
    monkeypatch.setattr(job, "find_mpirun", lambda: "mpirun")
    monkeypatch.setattr(sys, "executable", "/my venv/python")
    assert job.main(flags) == 0
    said = capsys.readouterr()
    launch = [line.partition("  #")[0].rstrip() for line in said.out.splitlines() if line.startswith("launch=")]
    assert launch == [on]
    assert "\npython='/my venv/python' " in said.out
    assert ("no mpirun says" in said.err) == (version is None)
    changed = {*said.out.splitlines()} ^ {*SCRIPT.read_text().splitlines()}
    assert {line.lstrip("# ").partition("=")[0] for line in changed} <= {"python", "launch"}


def test_how_ranks_start_is_not_asked_of_a_sweep(capsys):
    with pytest.raises(SystemExit):
        job.parse(["--sweep", "--launcher", "mpirun"])
    assert "--launcher with --sweep" in capsys.readouterr().err


def test_job_py_writes_the_sweep_for_this_python(monkeypatch, capsys):
    monkeypatch.setattr(sys, "executable", "/venv/python")
    assert job.main(["--sweep"]) == 0
    said = capsys.readouterr().out
    assert said == re.sub("^python=.venv/bin/python", "python=/venv/python", SWEEP.read_text(), flags=re.MULTILINE)
