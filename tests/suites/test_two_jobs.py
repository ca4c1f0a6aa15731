"""Two jobs with one --out: the second is refused, or the first ends before it writes anything more."""

import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dist.probe.programs import find_mpirun, mpirun_command, mpirun_environment
from gpt2.formats.checkpoints import Checkpoint, newest_first
from scripts.training.lock_file import LOCK, look
from tests.suites.faults.log import last_step, newest_step
from tests.suites.faults.processes import send, wait_until
from tests.suites.test_virtual_cluster import needs_cluster, run

pytestmark = pytest.mark.skipif(find_mpirun() is None, reason="no mpirun on this machine: pip install mpich")
TRAIN = Path(__file__).parents[2] / "scripts" / "train.py"
RANKS, EVERY = 2, 5
TRAINING = (
    "--n-layer", 1, "--n-head", 2, "--n-embd", 32, "--context", 16, "--batch-size", 2, "--threads", 1, "--resume",
    "--checkpoint-every", EVERY, "--eval-every", 0, "--strategy", "reduce-scatter",
)  # fmt: skip
ENDLESS = 100_000  # steps
TIME_LIMIT_S = 60
# train.py that waits a second for a file of another host, not ten.
IMPATIENT = "from scripts.training import run_lock; run_lock.SEEN_WITHIN_S = 1; from scripts import train; train.main()"


class Jobs:
    """Trainings in one run folder. The process of rank 0 is the lock's."""

    def __init__(self, folder: Path):
        self.run, self._folder, self._started = folder / "run", folder, []

    def start(self, *flags) -> subprocess.Popen:
        command = [*mpirun_command(RANKS), sys.executable, TRAIN, *TRAINING, "--out", self.run, *flags]
        with open(self._folder / f"{len(self._started)}.txt", "w") as output:
            job = subprocess.Popen(
                [str(word) for word in command],
                env=mpirun_environment(RANKS), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip
        self._started.append(job)
        return job

    def said(self, job: subprocess.Popen) -> str:
        return (self._folder / f"{self._started.index(job)}.txt").read_text()

    def steps(self, count: int) -> None:
        """Wait until so many more are made."""
        before = last_step(self.run)
        assert wait_until(lambda: last_step(self.run) >= before + count, TIME_LIMIT_S)

    def errors(self, job: subprocess.Popen) -> list[str]:
        """How it has ended: its code, and the lines that say why."""
        assert job.wait(TIME_LIMIT_S) == 2, self.said(job)
        assert "Traceback" not in self.said(job)
        return re.findall("^error: .*$", self.said(job), re.MULTILINE)

    def end(self) -> None:
        for job in self._started:
            send(signal.SIGKILL, job.pid)
            job.wait(TIME_LIMIT_S)


@pytest.fixture
def jobs(tmp_path):
    jobs = Jobs(tmp_path)
    yield jobs
    jobs.end()


def ranks_of(pid: int) -> list[int]:
    """The processes that share a rank's parent: the ranks of its job."""
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return [int(child) for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def content(run: Path) -> dict:
    """All that a later start or a reader looks at.

    Not the first job's own traces, which it still has open, and not what another of its ranks may have begun to write
    for a checkpoint: it has no name yet.
    """
    files = [path for path in run.rglob("*") if path.is_file()]
    return {
        path: path.read_bytes() for path in files if "earlier-traces" not in path.parts and ".part/" not in str(path)
    }


@pytest.mark.any_mpi
def test_a_second_job_is_refused_and_the_first_unharmed(jobs):
    first = jobs.start("--steps", ENDLESS)
    jobs.steps(2 * EVERY)
    lock = look(jobs.run / LOCK)
    [error] = jobs.errors(jobs.start("--steps", 3, "--seed", 5))
    assert f"the run is being trained by process {lock.pid} on {socket.gethostname()}, started" in error
    jobs.steps(2 * EVERY)
    assert first.poll() is None
    assert look(jobs.run / LOCK).run == lock.run
    steps = [int(step) for step in re.findall(r'"step": (\d+)', (jobs.run / "log.jsonl").read_text())]
    assert steps == list(range(1, len(steps) + 1))
    facts = Checkpoint(newest_first(jobs.run / "checkpoints")[0]).facts
    assert facts["run"] == lock.run


@pytest.mark.any_mpi
def test_after_a_kill_the_next_start_goes_on_at_once(jobs):
    first = jobs.start("--steps", ENDLESS)
    assert wait_until(lambda: newest_step(jobs.run), TIME_LIMIT_S)
    lock = look(jobs.run / LOCK)
    send(signal.SIGKILL, *ranks_of(lock.pid))
    first.wait(TIME_LIMIT_S)
    newest, last = newest_step(jobs.run), last_step(jobs.run)
    (jobs.run / "summary.json").write_text("{}\n")  # of an earlier start
    second = jobs.start("--steps", ENDLESS)
    assert wait_until(lambda: last_step(jobs.run) > last, TIME_LIMIT_S), jobs.said(second)
    assert f"taken over from {lock}: it has ended" in jobs.said(second)
    assert "watching" not in jobs.said(second)
    assert f"continues from step {newest}\n" in jobs.said(second)
    assert not (jobs.run / "summary.json").exists(), "it would say that all steps are done"


@pytest.mark.any_mpi
def test_a_job_that_was_stopped_writes_nothing_once_another_has_taken_over(jobs):
    """It wakes up when the other has come to its end, in the middle of what it did."""
    first = jobs.start("--steps", ENDLESS)
    jobs.steps(2 * EVERY)
    stopped = ranks_of(look(jobs.run / LOCK).pid)
    send(signal.SIGSTOP, *stopped)
    last = last_step(jobs.run)
    second = jobs.start("--steps", last + 3, "--take-over")
    assert second.wait(TIME_LIMIT_S) == 0, jobs.said(second)
    before = content(jobs.run)
    send(signal.SIGCONT, *stopped)
    [error] = jobs.errors(first)
    assert f"{LOCK}: it is gone" in error
    assert content(jobs.run) == before


@pytest.mark.parametrize(
    ("of_both", "of_second"),
    [
        pytest.param((), ("--take-over",), id="asked"),
        pytest.param(("--supervisor", "7f" * 16), (), id="supervisor", marks=pytest.mark.any_mpi),
    ],
)
def test_who_takes_over_ends_the_other_job(jobs, of_both, of_second):
    """A start of --restarts does it by itself: what is left of one before must not write beside it."""
    first = jobs.start("--steps", ENDLESS, *of_both)
    jobs.steps(2 * EVERY)
    second = jobs.start("--steps", ENDLESS, *of_both, *of_second)
    [error] = jobs.errors(first)
    assert f"the run was taken over by {look(jobs.run / LOCK)}" in error
    jobs.steps(2 * EVERY)
    assert second.poll() is None


@pytest.mark.any_mpi
def test_checkpoints_that_are_removed_are_made_again(jobs):
    job = jobs.start("--steps", ENDLESS)
    jobs.steps(2 * EVERY)
    shutil.move(jobs.run / "checkpoints", jobs.run / "moved")
    assert wait_until(lambda: newest_step(jobs.run), TIME_LIMIT_S)
    assert job.poll() is None
    assert len(re.findall(r"^rank \d on .*checkpoints was gone, with its checkpoints: ", jobs.said(job), re.M)) == 1


@needs_cluster
@pytest.mark.any_mpi
def test_a_host_that_does_not_share_the_run_folder_is_named(tmp_path):
    """Of two hosts one has a disk of its own at the same path."""
    out = tmp_path / "run"
    train = f'exec {sys.executable} -c "{IMPATIENT}" --out {out} --steps 2'
    alone = f"mount -t tmpfs none {tmp_path} && {train}"
    command = ["sh", "-c", f"if [ $(hostname) = node1 ]; then unshare -m sh -c '{alone}'; else {train}; fi"]
    ended = run("run", "--nodes", 2, "--ranks", 2, "--rate", "1gbit", command=command)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    [error] = re.findall("^error: .*$", ended.stdout + ended.stderr, re.MULTILINE)
    assert re.search(rf"{out}/{LOCK}: made by rank 0 on node0, and not seen on node1 within", error)
    assert not out.exists(), "a mistake leaves nothing behind"
