"""dist/watch/watchdog.py: who holds the others up is named while it does, and nobody else ever is.

What it concludes from the ranks' positions: tests/unit/test_stalls.py.
"""

import json
import re
import sys
import time
from pathlib import Path

import pytest

from tests.support.launch import launch

ROOT = Path(__file__).parents[2]

PROGRAM = """
import itertools, os, signal, subprocess, time
from collections import deque
from dist.watch.watchdog import Watchdog
from dist.world import start_world, world_of
from traces import Tracer
from traces.record.phases import EXCHANGE, PHASES

def stop(seconds=None):
    if seconds:
        subprocess.Popen(["sh", "-c", f"sleep {{seconds}}; kill -CONT {{os.getpid()}}"])
    os.kill(os.getpid(), signal.SIGSTOP)

def hold_the_lock():
    deque(itertools.repeat(None), maxlen=0)

world, folder = start_world(), {folder!r}
{setup}
watchdog = Watchdog(world, folder, PHASES, {meetings}, {after}, {ends}{more})
tracer = Tracer(on_phase=watchdog.on_phase)
for step in range(1, 5):
    with tracer.step(step):
        with tracer.phase("backward"):
            time.sleep(0.02)
            if step == 3 and world.rank == {rank}:
                {backward}
        with tracer.phase("allreduce"):
            if step == 3 and world.rank == {rank}:
                {allreduce}
            world.comm.Barrier()
watchdog.close()
world.print("went on to the end")
"""
MEETINGS = '(*EXCHANGE, "wait")'
TWO_NODES = "world = world_of(world.comm, world.comm.Split(world.rank % 2, world.rank))"
STOP_THE_FIRST_NODE = "world.rank < 2 and stop()"
FOLDERS_APART = f"{TWO_NODES}; folder += str(world.node)"


def run(
    tmp_path, rank, ranks=3, after=0.8, ends=False, setup="", backward="pass", allreduce="pass", meetings=MEETINGS,
    more="",
):  # fmt: skip
    program = tmp_path / "program.py"
    folder = str(tmp_path / "traces")
    program.write_text(PROGRAM.format(**{name: value for name, value in locals().items() if name != "program"}))
    started = time.monotonic()
    result = launch(ranks, [sys.executable, str(program)])
    assert time.monotonic() - started < 60, "it neither ended nor went on"
    assert ("went on to the end" in result.stdout) == (result.returncode == 0), result.stderr
    assert (result.returncode != 0) == ends, result.stderr
    return result, [line for line in result.stderr.splitlines() if " while " in line]


def test_a_rank_that_is_stopped_is_named_once_and_the_job_goes_on_with_it(tmp_path):
    result, told = run(tmp_path, rank=1, backward="stop(seconds=1.7)")
    assert len(told) == 1, result.stderr
    assert re.search(r"rank 1 on \S+ .*backward of step 3.* while (1 rank waits|2 ranks wait) in allreduce", told[0])
    assert re.search(r"py-spy dump --pid \d+", told[0])
    assert result.stderr.count("rank 1 on") == 2
    assert result.stderr.count("the stall is over") == 1


def test_of_ranks_that_share_a_model_the_one_is_named_that_waits_for_nobody(tmp_path):
    """All have met equally often: what others wait in is no meeting of all."""
    more = ", waits=EXCHANGE, titles=['stage 0', 'stage 1', 'stage 2']"
    _, told = run(tmp_path, rank=1, meetings='("wait",)', more=more, backward="time.sleep(1.7)")
    assert len(told) == 1
    assert re.search(
        r"rank 1 on \S+ \(stage 1\) has been in backward of step 3 .* while \d ranks? waits? in all", told[0]
    )


@pytest.mark.parametrize(
    ("rank", "where", "how"),
    [(0, "backward", "hold_the_lock()"), (2, "allreduce", "stop()")],
    ids=["rank 0 holds Python's lock", "stopped inside the collective"],
)
def test_the_job_ends_when_told(tmp_path, rank, where, how):
    """Also when rank 0, whose task it is, is the one; and when all have come to the collective, but one is stopped."""
    _, told = run(tmp_path, rank, ends=True, **{where: how})
    assert len(told) == 1
    assert re.search(
        rf"rank {rank} on \S+ .*{where} of step 3.* while [12] ranks? waits? in allreduce.*the job ends", told[0]
    )


def test_a_rank_on_another_node_is_named(tmp_path):
    """Stopped, and nobody there to tell where: what it last wrote may be a step old."""
    _, told = run(tmp_path, rank=1, setup=TWO_NODES, ends=True, backward="stop()")
    assert re.search(
        r"rank 1 on \S+ shows no sign of life .*last seen in .* while [12] ranks? waits? in allreduce", told[0]
    )


@pytest.mark.any_mpi
def test_where_the_first_two_are_gone_the_next_node_looks(tmp_path):
    """Stopped, both of them, as on a host that died; nobody is left who would hear of an abort."""
    setup = "world = world_of(world.comm, world.comm.Split(world.rank // 2, world.rank))"
    _, told = run(tmp_path, rank="world.rank", ranks=4, setup=setup, ends=True, backward=STOP_THE_FIRST_NODE)
    assert len(told) == 1
    assert re.search(
        r"rank 0 on \S+, rank 1 on \S+ shows? no sign of life .* while \d ranks? waits? in allreduce", told[0]
    )


@pytest.mark.any_mpi
@pytest.mark.parametrize("gone", [(1,), (0, 1)], ids=["a node's only rank", "the first node"])
def test_who_has_sigterm_and_waits_for_a_rank_that_is_gone_ends(tmp_path, gone):
    """As srun does it where a rank has died: here it is stopped, and has no SIGTERM. No stall is waited for."""
    setup = (
        f"world = world_of(world.comm, world.comm.Split(world.rank in {gone}, world.rank))\n"
        "from scripts.training.signals import Signals\n"
        "signals, pids = Signals(None), world.comm.allgather(os.getpid())\n"
        "signals.requested()"
    )
    stop = (
        f"world.rank in {gone} and (world.rank == 1 and "
        f"[os.kill(pid, signal.SIGTERM) for rank, pid in enumerate(pids) if rank not in {gone}], stop())"
    )
    more = ", is_asked=signals.has_sigterm"
    result, told = run(tmp_path, "world.rank", 4, after=4, ends=True, setup=setup, backward=stop, more=more)
    assert not told
    named = ", ".join(rf"rank {rank} on \S+" for rank in gone)
    said = re.findall(rf"^{named} shows no sign of life, and all others wait for it", result.stderr, re.MULTILINE)
    assert len(said) == 1, result.stderr


@pytest.mark.any_mpi
def test_without_a_shared_file_system_it_says_so_and_watches_its_own_node(tmp_path):
    result, told = run(tmp_path, rank=2, setup=FOLDERS_APART, backward="time.sleep(1.5)")
    assert result.stdout.count("is not shared with") == 1
    assert len(told) == 1
    assert re.search(r"rank 2 on \S+ .*backward of step 3.* while 1 rank waits", told[0])
    assert not list(tmp_path.glob("traces*/*")), "nothing is left behind"


def test_a_slow_rank_is_not_accused(tmp_path):
    result, told = run(tmp_path, rank=1, after=2, setup=TWO_NODES, backward="time.sleep(0.8)")
    assert not told
    assert "not shared" not in result.stdout


@pytest.mark.any_mpi
def test_train_names_a_rank_and_logs_the_slowest(tmp_path):
    """Through scripts/train.py: in the middle of backward; and the rank is the slowest of that step."""
    program = tmp_path / "program.py"
    program.write_text(
        "import time\nfrom scripts import train\nfrom strategies import STRATEGIES\n"
        "class Late(STRATEGIES['allreduce']):\n"
        "    step = 0\n"
        "    def gradients_final(self, start, stop):\n"
        "        self.step += start == 0\n"
        "        if start == 0 and self.comm.rank == 1: time.sleep(1.7 if self.step == 3 else 0.02)\n"
        "STRATEGIES['allreduce'] = Late\ntrain.main()\n"
    )
    flags = ["--n-layer=1", "--n-head=2", "--n-embd=16", "--context=16", "--steps=6", "--stall-after=1"]
    out = tmp_path / "run"
    command = [sys.executable, str(program), *flags, "--strategy", "allreduce", "--eval-every", "0", "--out", str(out)]
    result = launch(2, command, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert len(re.findall("rank 1 on .* in backward of step 3 .* 1 rank waits in allreduce", result.stderr)) == 1
    assert result.stderr.count("the stall is over") == 1
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert rows[2]["slowest_rank"] == 1
    assert rows[2]["slowest_excess"] > 5
    assert re.search(r"step 6/6 .*  slowest rank 1 \(\S+\) \+\d+%", result.stdout)
    assert not list((out / "traces").glob("*.live"))


@pytest.mark.any_mpi
@pytest.mark.parametrize("hangs", [False, True], ids=["long", "hangs"])
def test_a_server_waits_for_a_long_validation_but_not_for_one_that_hangs(tmp_path, hangs):
    """Of four batches, each quicker than --stall-after, all together slower; or the third of them never ends."""
    program = tmp_path / "program.py"
    program.write_text(
        "import time\nfrom gpt2.model import GPT2\nfrom scripts import train\n"
        "whole, seconds = GPT2.token_losses, iter([0.8, 0.8, %s, 0.8])\n"
        "def late(*arguments):\n"
        "    time.sleep(next(seconds))\n"
        "    return whole(*arguments)\n"
        "GPT2.token_losses = late\ntrain.main()\n" % (60 if hangs else 0.8)
    )
    flags = "--n-layer 1 --n-head 2 --n-embd 16 --context 16 --steps 1 --eval-steps 4 --stall-after 2.5 --end-on-stall"
    flags += " --strategy reduce-bcast --server dedicated"
    command = [sys.executable, str(program), *flags.split(), "--out", str(tmp_path / "run")]
    result = launch(2, command, cwd=ROOT)
    assert (result.returncode == 0) == (not hangs), result.stderr
    told = re.findall("rank 1 on .* in eval of step 1 .* 1 rank waits in wait", result.stderr)
    assert len(told) == hangs
