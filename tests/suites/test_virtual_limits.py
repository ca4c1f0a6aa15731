"""virtual_cluster.py --cores-per-host, --memory-per-host: hosts with a part of the cores' time and of the memory."""

import os
import re
import signal
import sys

import pytest

from dist.control_groups import PLACES, VERSION_2, own_groups
from scripts.cluster import launch, program
from scripts.cluster.groups import MARK, Limits, limited_groups
from scripts.cluster.hosts import command_line
from tests.suites.faults.processes import wait_until
from tests.suites.test_virtual_cluster import SCRIPTS, TIME_LIMIT_S, alive, result_of, run, start
from tests.support.virtual_hosts import missing_hosts, needs

SMALL = ["--nodes", 2, "--ranks", 2, "--rate", "1gbit"]
# What a rank finds of its limits; what part of a core a loop gets, and in how many of its group's periods it is held.
LIMITS = """
import json, time
from dist.control_groups import VERSION_2, cpu_quota, memory_limit, own_groups, text_of
from dist.world import start_world, threads_per_rank
from scripts.settings.memory import available_bytes
world = start_world()
group = (own_groups("cpu") or own_groups(VERSION_2))[0]
def counts():
    words = text_of(group / "cpu.stat").split()
    return [int(words[words.index(name) + 1]) for name in ("nr_periods", "nr_throttled")]
threads = threads_per_rank(world)
(periods, held), start, used = counts(), time.perf_counter(), time.process_time()
while time.perf_counter() < start + 1.5:
    pass
share = (time.process_time() - used) / (time.perf_counter() - start)
all_periods, all_held = counts()
found = [cpu_quota(), memory_limit(), available_bytes() < 600e6, threads, share,
         (all_held - held) / (all_periods - periods)]
world.print("RESULT", json.dumps(world.comm.gather(found)))
"""
# Rank 1 takes what no check has allowed.
GREEDY = """
import time
import numpy as np
from dist.world import start_world
world = start_world()
taken = [np.ones(25_000_000) for _ in range(5)] if world.rank == 1 else []
world.comm.Barrier()
"""


def limits_work() -> None:
    """ClusterError where this machine lets us make no groups."""
    with limited_groups(["trial"], Limits(1.0, 10**9)):
        pass


needs_limits = needs(missing_hosts(program.check_machine, launch.mpirun_here, limits_work))


def left_groups() -> list[str]:
    tops = [own_groups(controller, PLACES)[-1:] for controller in ("cpu", "memory", VERSION_2)]
    walked = (walked for top in tops for path in top for walked in os.walk(path))
    return [f"{folder}/{name}" for folder, names, _ in walked for name in names if name.startswith(MARK)]


@needs_limits
def test_a_host_has_its_part_and_ranks_know_it(tmp_path):
    flags = [*SMALL, "--cores-per-host", "0.4", "--memory-per-host", "600MB"]
    found = result_of(tmp_path, LIMITS, *flags)
    whole_pages = 600_000_000 // os.sysconf("SC_PAGESIZE") * os.sysconf("SC_PAGESIZE")
    assert [row[:4] for row in found] == [[0.4, whole_pages, True, 1]] * 2
    for *_, share, held in found:  # both smaller on a busy machine
        assert 0.0 < share < 0.47
        assert 0.0 < held <= 1.0
    assert not left_groups()


@needs_limits
def test_what_does_not_fit_is_ended_and_a_line_says_where(tmp_path):
    file = tmp_path / "greedy.py"
    file.write_text(GREEDY)
    result = run("run", *SMALL, "--memory-per-host", "600MB", command=[sys.executable, str(file)])
    assert result.returncode != 0
    # Anywhere in a line: Open MPI's last words end in a zero byte.
    told = re.findall(r"host node.*", result.stderr)
    assert len(told) == 1, result.stderr
    assert told[0].startswith("host node1: its limit of 600 MB ended a process (memory.")
    assert told[0].endswith(": oom_kill 1)")
    assert not left_groups()


@pytest.mark.any_mpi
@needs_limits
def test_a_training_that_does_not_fit_ends_in_one_line_before(tmp_path):
    """Before anything is written, and before the kernel has to end it."""
    result = train(tmp_path)
    assert result.returncode == 2, result.stderr
    errors = [line for line in result.stderr.splitlines() if "error: " in line]
    assert len(errors) == 1
    assert "a model of 38M parameters and --batch-size 1 take 0.6 GB or more on node0, expected at most" in errors[0]
    assert "host node" not in result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.any_mpi
@needs_limits
def test_cut_into_pieces_it_fits(tmp_path):
    """On hosts of the same size: each has a quarter of the model."""
    result = train(tmp_path, "--tensor-parallel", "2", "--pipeline-parallel", "2")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "host node" not in result.stderr
    assert (tmp_path / "run").exists()


def train(tmp_path, *flags):
    """One step of a model of 12 layers on four hosts that are too small for its parameters, gradients and moments."""
    model = ["--n-layer", "12", "--n-head", "8", "--n-embd", "512", "--context", "64", "--batch-size", "1"]
    command = [sys.executable, str(SCRIPTS / "train.py"), "--out", str(tmp_path / "run"), "--strategy", "allreduce"]
    command += [*model, "--steps", "1", "--eval-every", "0", *flags]
    return run("run", "--nodes", 4, "--ranks", 4, "--rate", "1gbit", "--memory-per-host", "600MB", command=command)


@pytest.mark.any_mpi
@needs_limits
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_no_group_stays_after(number):
    """Not even of a script that is killed, and without a next start."""
    seconds = f"64.{os.getpid()}"
    script = limited_sleepers(seconds)
    assert left_groups()
    script.send_signal(number)
    script.communicate()
    assert wait_until(lambda: not left_groups(), TIME_LIMIT_S)
    assert not alive(seconds)


def limited_sleepers(seconds: str):
    """A cluster of 2 hosts whose ranks sleep, once they do."""
    flags = ["--cores-per-host", "0.4", "--memory-per-host", "600MB"]
    script = start("run", *SMALL, *flags, command=["sleep", seconds])
    assert wait_until(lambda: sum(command_line(pid)[:1] == ["sleep"] for pid in alive(seconds)) == 2, TIME_LIMIT_S)
    return script


@pytest.mark.any_mpi
@needs_limits
def test_two_limited_clusters_at_once():
    """Each has groups of its own."""
    scripts = [start("run", *SMALL, "--memory-per-host", "600MB", command=["sleep", "1"]) for _ in range(2)]
    said = [script.communicate()[1] for script in scripts]
    assert not re.search("error|host node", "".join(said)), said
    assert [script.returncode for script in scripts] == [0, 0]
