"""What fails during a run, provoked from outside: the job ends or goes on as docs/failures.md says, and is resumed.

What a host's end, a cut cable or a full disk come to, under each launcher, tests/suites/failure_suite.py shows.
"""

import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from dist.console import BY_CTRL_C
from dist.probe.programs import find_mpirun, mpirun_command, mpirun_environment
from gpt2.formats.checkpoints import STATE, Checkpoint
from scripts.training.signals import INTERRUPTED
from tests.suites import random_kills
from tests.suites.faults.log import curve, last_step, newest_step
from tests.suites.faults.processes import launcher_process, rank_processes, send, wait_until

SCRIPTS = Path(__file__).parents[2] / "scripts"


pytestmark = pytest.mark.skipif(find_mpirun() is None, reason="no mpirun on this machine: pip install mpich")
RANKS, STEPS, EVERY = 2, 120, 10
TRAINING = (
    "--n-layer", 1, "--n-head", 2, "--n-embd", 32, "--context", 16, "--batch-size", 2, "--steps", STEPS, "--threads", 1,
    "--checkpoint-every", EVERY, "--eval-every", 0, "--trace", "off", "--resume", "--strategy", "reduce-scatter",
)  # fmt: skip
FAULT_STEP = 25
TIME_LIMIT_S = 60  # for anything here to happen
FEW_BYTES = 20_000  # less than a rank writes of a checkpoint


class Job:
    """A training under mpirun that has made FAULT_STEP steps when it is made; ended, whatever happens, by `end`."""

    def __init__(self, run: Path, *flags, before=(), launcher=None):
        self.run, self._output = run, run.with_suffix(".txt")
        launcher = mpirun_command(RANKS) if launcher is None else launcher
        train = [*before, sys.executable, SCRIPTS / "train.py", *TRAINING, "--out", run, *flags]
        with open(self._output, "w") as output:
            self.process = subprocess.Popen(
                [str(word) for word in [*launcher, *train]],
                env=mpirun_environment(RANKS), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip
        wait_until(lambda: last_step(run) >= FAULT_STEP or self.process.poll() is not None, TIME_LIMIT_S)

    def pid(self, rank: int) -> int:
        return rank_processes(self.run)[rank]

    def says(self, pattern: str) -> str:
        """Wait until it has said so."""
        found = wait_until(lambda: re.search(pattern, self._output.read_text()), TIME_LIMIT_S)
        assert found, self._output.read_text()
        return found[0]

    def said(self) -> str:
        return self._output.read_text()

    def ends(self) -> int:
        """Its exit code; with it all ranks have ended."""
        code = self.process.wait(TIME_LIMIT_S)
        assert wait_until(lambda: not rank_processes(self.run), TIME_LIMIT_S)
        return code


@pytest.fixture
def start():
    """Makes Jobs that end with the test."""
    jobs = []

    def make(*arguments, **options) -> Job:
        jobs.append(Job(*arguments, **options))
        return jobs[-1]

    yield make
    for job in jobs:
        send(signal.SIGKILL, *rank_processes(job.run).values(), job.process.pid)
        job.process.wait(TIME_LIMIT_S)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    job = Job(run)
    assert job.ends() == 0, job.says("")
    return run


def goes_on_as(undisturbed: Path, start, run: Path, from_step: int) -> None:
    """Resumed, it ends with the same bits; and what had been half written is gone."""
    job = start(run)
    assert job.ends() == 0, job.says("")
    assert job.says(rf"continues from step {from_step}\b")
    is_same(undisturbed, run)


def is_same(undisturbed: Path, run: Path) -> None:
    assert curve(run) == curve(undisturbed)
    random_kills.check_equal(undisturbed, run, STEPS)
    assert {path.suffix for path in (run / "checkpoints").iterdir()} == {""}
    assert not list(run.glob(".*"))


@pytest.mark.any_mpi
def test_a_killed_rank_ends_the_job_and_costs_the_steps_since_the_checkpoint(undisturbed, start, tmp_path):
    job = start(tmp_path / "run")
    send(signal.SIGKILL, job.pid(1))
    assert job.ends() != 0
    # The checkpoint of step 20 is complete when step 21 or a later one has ended.
    newest = newest_step(job.run)
    assert newest % EVERY == 0
    assert 0 <= last_step(job.run) - newest <= 2 * EVERY
    (job.run / ".0123456789abcdef.tmp").touch()  # as of a config.json that was being written
    goes_on_as(undisturbed, start, job.run, newest)


def test_a_killed_rank_under_restarts_needs_no_hand(undisturbed, start, tmp_path):
    again = "--restarts", 3, "--launcher", shlex.join(mpirun_command(RANKS))
    slow = ("--eval-every", 1, "--eval-steps", 10)  # still under way when the signal comes
    job = start(tmp_path / "run", *again, *slow, launcher=())
    send(signal.SIGKILL, job.pid(1))
    assert job.ends() == 0
    assert job.says(r"they start again in 5 s, from the checkpoint of step \d+0\n")
    assert job.says("the run has ended well\n")
    (job.run / "restarts.jsonl").unlink()
    is_same(undisturbed, job.run)


def test_signals_ask_for_a_checkpoint_or_for_the_end(undisturbed, start, tmp_path):
    """SIGUSR1 to a rank: one more checkpoint. SIGUSR2 to a rank, SIGTERM to all: a checkpoint, and exit code 75."""
    # No other checkpoints: one that is asked for in a step that has one anyway could not be told from it. An evaluation
    # after each step, which changes no curve, leaves time for the signals before the last step.
    slow = ("--eval-every", 1, "--eval-steps", 10)
    job = start(tmp_path / "run", "--keep", STEPS, "--checkpoint-every", STEPS, *slow)
    send(signal.SIGUSR1, job.pid(1))
    assert wait_until(lambda: checkpoints(job.run), TIME_LIMIT_S)
    send(signal.SIGUSR2, job.pid(1))
    assert job.ends() == INTERRUPTED
    step = last_step(job.run)
    assert newest_step(job.run) == step < STEPS
    assert job.says(f"a signal ended the run after step {step}")
    again = start(job.run)
    send(signal.SIGTERM, *rank_processes(job.run).values())
    assert again.ends() in (INTERRUPTED, 0)
    assert newest_step(job.run) == last_step(job.run) >= step
    if last_step(job.run) < STEPS:  # the signal came before the end
        goes_on_as(undisturbed, start, job.run, last_step(job.run))


def test_ctrl_c_is_a_checkpoint_and_one_line(undisturbed, start, tmp_path):
    """To all ranks, as a launcher hands it on: exit code 130, no traceback, and the run goes on bit for bit."""
    slow = ("--eval-every", 1, "--eval-steps", 10)
    job = start(tmp_path / "run", "--checkpoint-every", STEPS, *slow)
    send(signal.SIGINT, *rank_processes(job.run).values())
    assert job.ends() == BY_CTRL_C
    step = last_step(job.run)
    assert newest_step(job.run) == step < STEPS
    assert job.says(f"a signal ended the run after step {step}")
    assert "Traceback" not in job.said()
    goes_on_as(undisturbed, start, job.run, step)


def checkpoints(run: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*") if not path.suffix]


@pytest.mark.any_mpi
def test_no_room_for_a_checkpoint_is_said_and_the_run_goes_on(undisturbed, start, tmp_path):
    """One rank may write only short files for a while."""
    job = start(tmp_path / "run")
    pid = job.pid(1)
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (FEW_BYTES, resource.RLIM_INFINITY))
    said = job.says(r"rank 1 on \S+: the checkpoint of step (\d+) was not written: .*")
    assert "free some space" in said
    resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
    assert job.ends() == 0
    is_same(undisturbed, job.run)


@pytest.mark.any_mpi
def test_a_folder_that_may_not_be_written_any_more(undisturbed, start, tmp_path):
    before = ()
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root may write everywhere, and there is no setpriv (util-linux) to make it like others")
        before = ("setpriv", "--bounding-set=-dac_override,-dac_read_search,-fowner", "--")
    job = start(tmp_path / "run", before=before)
    newest = newest_step(job.run)
    subprocess.run(["chmod", "-R", "a-w", job.run], check=True)
    assert job.ends() == 2
    subprocess.run(["chmod", "-R", "u+w", job.run], check=True)
    assert job.says(r"was not written: .*Permission denied")
    assert job.says(r"error: .*Permission denied")
    kept = newest_step(job.run)
    assert newest <= kept < STEPS
    goes_on_as(undisturbed, start, job.run, kept)


@pytest.mark.any_mpi
def test_a_folder_that_vanishes_ends_the_job(start, tmp_path):
    job = start(tmp_path / "run")
    shutil.move(job.run, tmp_path / "elsewhere")
    assert job.ends() not in (0, INTERRUPTED)
    assert job.says(r"error: .*rank 0 of 2 on \S+\)")
    assert not job.run.exists()
    assert checkpoints(tmp_path / "elsewhere"), "what was there before is still good"


def test_a_rank_that_hangs_is_named_and_ends_the_job_when_told(start, tmp_path):
    job = start(tmp_path / "run", "--end-on-stall", "--stall-after", 2, "--steps", 100_000)
    send(signal.SIGSTOP, job.pid(1))
    assert job.ends() not in (0, INTERRUPTED)
    assert job.says(r"rank 1 on \S+ shows no sign of life .* the job ends, as --end-on-stall says")


def test_after_sigterm_nobody_waits_for_a_rank_that_is_gone(start, tmp_path):
    """As srun does it when a rank has died: the others have SIGTERM and wait. They end, without --end-on-stall."""
    job = start(tmp_path / "run", "--steps", 100_000)
    send(signal.SIGSTOP, job.pid(1))
    send(signal.SIGTERM, job.pid(0))
    job.says(r"rank 1 on \S+ shows no sign of life, and all others wait for it: they end, as SIGTERM asks for")
    assert job.ends() != 0


def test_the_launcher_cannot_leave_ranks_behind(start, tmp_path):
    """They would go on writing into a folder that the next start writes, too."""
    job = start(tmp_path / "run", "--steps", 100_000)
    send(signal.SIGKILL, launcher_process(job.run))
    assert job.ends() != 0


def test_a_signal_does_not_replace_the_exit_code_of_a_rank_that_waits_in_finalize():
    """As of srun --kill-on-bad-exit, when another rank has left a moment before."""
    program = (
        "import os, time; import mpi4py; mpi4py.rc(initialize=False, finalize=True)\n"
        "from dist.world import start_mpi\n"
        "comm = start_mpi(); comm.Barrier()\n"
        "if comm.rank: time.sleep(2.5)\n"
        "else: print(os.getpid(), flush=True)\n"
        "raise SystemExit(2)\n"
    )
    command = [*mpirun_command(2), sys.executable, "-c", program]
    with subprocess.Popen(command, env=mpirun_environment(2), stdout=subprocess.PIPE, text=True) as process:
        rank = int(process.stdout.readline())
        time.sleep(1)
        os.kill(rank, signal.SIGTERM)
        assert process.wait(TIME_LIMIT_S) == 2


def test_an_abort_that_hangs_ends_the_rank():
    """As where the host is cut off from the launcher: MPI_Abort waits for ever, with Python's lock."""
    program = (
        "import ctypes, os, sys, mpi4py; mpi4py.rc.initialize = False; from dist.world import end_job\n"
        "class Comm:\n"
        "    def Abort(self, code): ctypes.PyDLL(None).sleep(1000)\n"
        "if sys.argv[1] == 'closed': reader, writer = os.pipe(); os.dup2(writer, 2); os.close(reader)\n"
        "end_job(Comm(), 'the end')\n"
    )
    words, pipe = [sys.executable, "-c", program], subprocess.PIPE
    ends = {stderr: subprocess.Popen([*words, stderr], stderr=pipe, text=True) for stderr in ("open", "closed")}
    for stderr, process in ends.items():
        _, said = process.communicate(timeout=TIME_LIMIT_S)
        assert process.returncode != 0
        assert stderr == "closed" or said.startswith("the end")


@pytest.mark.any_mpi
@pytest.mark.parametrize("array", ["loss", *STATE])
def test_random_kills_notices_other_bits(undisturbed, tmp_path, array):
    """The comparison at its end: one loss, or one number of the last state, is another."""
    copy = tmp_path / "copy"
    shutil.copytree(undisturbed, copy)
    random_kills.check_equal(undisturbed, copy, STEPS)
    if array == "loss":
        lines = (copy / "log.jsonl").read_text().splitlines()
        line = json.loads(lines[40])
        line["loss"] = float(np.nextafter(line["loss"], 10))
        (copy / "log.jsonl").write_text("\n".join([*lines[:40], json.dumps(line), *lines[41:]]) + "\n")
    else:
        write_other_state(copy / "checkpoints" / f"step-{STEPS:08d}", array)
    with pytest.raises(random_kills.Failed):
        random_kills.check_equal(undisturbed, copy, STEPS)


def write_other_state(checkpoint: Path, array: str) -> None:
    """The same checkpoint, correctly written, with one bit changed."""
    from gpt2.formats.checkpoint_files import write_part
    from gpt2.formats.checkpoints import complete

    old = Checkpoint(checkpoint)
    facts = {name: value for name, value in old.facts.items() if name not in ("files", "format", "crc32")}
    ranges = []
    for name in STATE:
        values = np.empty(facts["count"], np.float32)
        old.read(name, 0, values)
        if name == array:
            values.view(np.uint32)[7] ^= 1
        ranges.append((name, 0, values))
    shutil.rmtree(checkpoint)
    part = checkpoint.with_suffix(".part")
    size = write_part(part, facts["step"], 0, ranges, facts["run"])
    complete(part, facts, {"rank-00000.safetensors": size})
