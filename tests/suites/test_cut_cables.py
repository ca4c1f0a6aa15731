"""A host whose cable is cut is out of the launchers' reach, as by ssh, until the cable is mended."""

import re
import subprocess

import pytest

from scripts.cluster.launch import AGENT, mpirun_here
from scripts.cluster.program import check_machine
from tests.suites.faults.launchers import mpirun_hosts
from tests.suites.faults.processes import processes_on, wait_until
from tests.support.virtual_hosts import missing_hosts, needs

pytestmark = [pytest.mark.any_mpi, needs(missing_hosts(check_machine, mpirun_here))]
LIMIT_S = 60


@pytest.fixture(scope="module")
def cluster():
    with mpirun_hosts() as cluster:
        yield cluster


def reach(cluster, *command) -> subprocess.CompletedProcess:
    """As mpirun calls its agent, with an option of ssh's before the host."""
    words = cluster.head.enter(AGENT, "-x", "node1", *command)
    return subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S)


@pytest.mark.parametrize("how", [("cut_cable", "mend_cable"), ("block_port", "open_port")])
def test_an_agent_reaches_a_host_as_ssh_does(cluster, how):
    break_it, mend = (getattr(cluster, name) for name in how)
    assert reach(cluster, "hostname").stdout == "node1\n"
    break_it(1)
    away = reach(cluster, "hostname")
    assert (away.returncode, away.stdout) == (255, "")
    assert re.fullmatch("connect to host node1: (No route to host|Connection timed out)\n", away.stderr)
    mend(1)
    assert wait_until(lambda: reach(cluster, "hostname").stdout == "node1\n", LIMIT_S)


def test_the_processes_of_a_host_are_those_alone(cluster):
    first, other = (subprocess.Popen(cluster.nodes[node].enter("sleep", "60")) for node in (1, 2))
    try:
        found = wait_until(lambda: processes_on(cluster.nodes[1]), LIMIT_S)
        assert len(found) == 1
        assert processes_on(cluster.nodes[0]) == []
        assert cluster.nodes[1].pid not in found
    finally:
        for process in (first, other):
            process.kill()
            process.wait()
