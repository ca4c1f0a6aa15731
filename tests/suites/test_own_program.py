"""docs/your-own-program.md's example on virtual hosts, one of them with a slow port: the verdict names that port."""

import json
import re
import sys

import pytest

from scripts import diagnose
from tests.ranks.test_own_program import EXAMPLE
from tests.suites.test_virtual_cluster import needs_cluster, run
from tests.support.in_process import answer
from traces import read_run

pytestmark = pytest.mark.any_mpi


@needs_cluster
def test_the_slow_port_is_named(tmp_path):
    hosts = ["--nodes", 4, "--ranks", 4, "--rate", "1gbit", "--slow", "node2:100mbit"]
    ended = run("run", *hosts, command=[sys.executable, str(EXAMPLE), str(tmp_path / "slow")])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    traced = read_run(tmp_path / "slow")
    assert (traced.missing, len(traced.counters), len(traced.start_links), len(traced.end_links)) == ([], 4, 4, 4)
    answered = json.loads(answer(diagnose, tmp_path / "slow", "--json"))
    assert (answered["bottleneck"]["kind"], answered["bottleneck"]["node"]) == ("slow-link", 2)
    assert re.match(r"node2's port carries 1[12](\.\d)? MB/s", answered["verdict"])  # of 12.5
    assert answered["evidence"]["nodes"][2]["bytes_a_step"]["in"] > 1e6
