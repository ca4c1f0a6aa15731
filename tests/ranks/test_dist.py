"""Ranks, nodes, cores, clocks; and the promise that a failing rank ends the job on all, at once."""

import dataclasses
import os
import signal
import sys
import time
from contextlib import suppress

import numpy as np
import pytest
from mpi4py import MPI

from dist import world
from dist.probe.links import clock_offset
from dist.ranges import cut
from dist.world import ClosedTogether, leave_together, lost_ranks, start_world, threads_per_rank, world_of
from tests.support.launch import launch

ENDS_WITHIN_S = 20  # "within seconds", on two busy cores; a hang would take the launcher's limit of minutes

FAILING = """
import os, signal, sys
from dist.world import start_world
world = start_world()
world.comm.Barrier()
if world.rank == 1:
    {failure}
world.comm.Barrier()
world.comm.Barrier()
"""


def run_failing(tmp_path, failure, options=()):
    program = tmp_path / "failing.py"
    program.write_text(FAILING.format(failure=failure))
    start = time.monotonic()
    result = launch(3, [sys.executable, *options, str(program)])
    assert time.monotonic() - start < ENDS_WITHIN_S
    assert result.returncode != 0
    return result


@pytest.mark.parametrize(
    ("failure", "options"),
    [("raise ValueError('no such luck')", ()), ("[][1]", ("-m", "mpi4py"))],
    ids=["python", "python -m mpi4py"],
)
def test_an_exception_on_one_rank_ends_the_job(tmp_path, failure, options):
    result = run_failing(tmp_path, failure, options)
    assert "rank 1 of 3 on " + os.uname().nodename in result.stderr
    assert "Traceback" in result.stderr
    assert failure.split("(")[0].removeprefix("raise ") in result.stderr


@pytest.mark.parametrize("failure", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(3)"], ids=["killed", "exits"])
def test_a_rank_that_dies_ends_the_job(tmp_path, failure):
    run_failing(tmp_path, failure)


def test_a_mistake_on_one_rank_is_one_line_for_all(tmp_path):
    """No traceback, exit code 2, and the ranks without the mistake do not hang."""
    program = tmp_path / "mistake.py"
    program.write_text(
        "from dist.world import start_world\n"
        "from gpt2.errors import UserError\n"
        "world = start_world()\n"
        "with world.together(UserError):\n"
        "    if world.rank == 2: raise UserError('found a pear, expected an apple')\n"
        "world.comm.Barrier()\n"
        "print('not reached')\n"
    )
    result = launch(3, [sys.executable, str(program)])
    assert result.returncode == 2
    assert result.stderr.count("found a pear") == 1
    assert "(rank 2 on " in result.stderr
    assert "Traceback" not in result.stderr
    assert "not reached" not in result.stdout


@pytest.mark.ranks(1, 3)
def test_world(comm):
    """All ranks of one machine are one node; places say the same on every rank."""
    world = start_world(expect_ranks=comm.size)
    assert (world.rank, world.size) == (comm.rank, comm.size)
    assert (world.node, world.node_count) == (0, 1)
    assert (world.local_rank, world.local_size) == (comm.rank, comm.size)
    assert [place["rank"] for place in world.places] == list(range(comm.size))
    assert comm.allgather(world.places) == [world.places] * comm.size


@pytest.mark.ranks(1, 2, 4)
def test_threads_never_crowd_the_cores(comm):
    for name in ("OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK"):
        os.environ.pop(name, None)
    world = start_world()
    threads = threads_per_rank(world)
    cores = len(set().union(*comm.allgather(os.sched_getaffinity(0))))
    assert threads >= 1
    assert comm.allreduce(threads) <= max(cores, comm.size)
    for name in ("OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK"):
        os.environ[name] = "1"
        assert threads_per_rank(world) == 1
        os.environ[name] = "64"
        assert threads_per_rank(world) == threads, "a limit never raises the number"
        del os.environ[name]


@pytest.mark.ranks(3)
def test_clock_offsets_between_nodes(comm):
    """Each rank plays a node of its own, and the clocks are one already: the offset is within its own bound."""
    places = [{"rank": rank, "node": rank, "host": "h", "local_rank": 0} for rank in range(comm.size)]
    world = dataclasses.replace(start_world(), places=places, local_comm=MPI.COMM_SELF)
    clock = clock_offset(world)
    assert abs(clock["offset_ns"]) <= clock["error_ns"] + 1
    assert (clock["error_ns"] == 0) == (comm.rank == 0)


@pytest.mark.parametrize(
    ("size", "expect", "environment", "says"),
    [
        (1, 4, {}, "1 ranks, expected 4"),
        (3, 4, {}, "3 ranks, expected 4"),
        (1, None, {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "8"}, "launcher started 8 (SLURM_NTASKS)"),
        (1, None, {"PMI_SIZE": "2"}, "launcher started 2 (PMI_SIZE)"),
        (1, None, {"OMPI_COMM_WORLD_SIZE": "4"}, "launcher started 4"),
        (1, None, {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "8", "PMI_SIZE": "1"}, None),  # mpirun -n 1 in an allocation
        (1, None, {"SLURM_NTASKS": "8"}, None),  # a batch script's own process
        (8, 8, {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "8"}, None),
        (1, None, {}, None),
    ],
)
def test_ranks_lost_on_the_way(size, expect, environment, says):
    problem = lost_ranks(size, expect, environment)
    assert problem is None if says is None else says in problem


def test_expect_ranks_ends_the_job(tmp_path):
    program = tmp_path / "expects.py"
    program.write_text("from dist.world import start_world\nstart_world(expect_ranks=4)\nprint('not reached')\n")
    result = launch(2, [sys.executable, str(program)])
    assert result.returncode == 2
    assert result.stderr.count("2 ranks, expected 4") == 1
    assert "not reached" not in result.stdout


@pytest.mark.parametrize(("count", "parts"), [(0, 3), (2, 3), (10, 1), (10, 3), (1055, 4)])
def test_cut_tiles_the_range(count, parts):
    ranges = cut(count, parts)
    covered = np.concatenate([np.arange(start, stop) for start, stop in ranges])
    np.testing.assert_array_equal(covered, np.arange(count))
    sizes = [stop - start for start, stop in ranges]
    assert len(ranges) == parts
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.ranks(3)
def test_all_ranks_run_as_many_threads(comm, monkeypatch):
    """Two share a node of four cores, one has such a node alone: it would wait for the two."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
    monkeypatch.setattr(world, "cpu_quotas", dict)
    for name in ("OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK"):
        monkeypatch.delenv(name, raising=False)
    assert threads_per_rank(world_of(comm, comm.Split(min(comm.rank, 1), comm.rank))) == 2
    assert threads_per_rank(world_of(comm, comm.Split(comm.rank, comm.rank))) == 4


@pytest.mark.ranks(3)
def test_no_rank_ends_before_all_are_deaf_to_sigterm(comm, monkeypatch):
    """Else srun, which ends the others when the first one does, reports their signal and not that one's code."""
    handlers, begun = [], comm.bcast(time.perf_counter())
    monkeypatch.setattr(signal, "signal", lambda *handler: handlers.append(handler))
    if comm.rank == 2:
        time.sleep(0.3)
    leave_together(comm)
    assert time.perf_counter() - begun >= 0.3  # one clock: all ranks are on this machine
    assert handlers == [(signal.SIGTERM, signal.SIG_IGN)]


@pytest.mark.parametrize(("error", "is_closed"), [(None, True), (SystemExit, True), (RuntimeError, False)])
def test_what_all_close_together_stays_open_when_one_fails(error, is_closed):
    closed = []
    with suppress(SystemExit, RuntimeError), ClosedTogether() as resources:
        resources.callback(closed.append, True)
        if error:
            raise error
    assert closed == [True] * is_closed


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("quotas", "threads"),
    [
        ([{"node": 3.0}] * 3, 1),
        ([{"node": 7.5}] * 3, 2),
        ([{"a": 2.0}, {"b": 2.0}, {"c": 3.0}], 2),
        ([{"a": 2.0, "all": 3.0}, {"b": 2.0, "all": 3.0}, {"c": 2.0, "all": 3.0}], 1),
        ([{}, {}, {"c": 1.9}], 1),
        ([{"node": 0.4}] * 3, 1),
        ([{"node": 90.0}] * 3, 4),
    ],
)
def test_a_quota_of_the_cores_limits_threads(comm, monkeypatch, quotas, threads):
    """The ranks in a control group share what it allows; twelve cores would be four for each."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(12)))
    monkeypatch.setattr(world, "cpu_quotas", lambda: quotas[comm.rank])
    for name in ("OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK"):
        monkeypatch.delenv(name, raising=False)
    assert threads_per_rank(world_of(comm, comm.Split(0, comm.rank))) == threads
