"""Every strategy at nine ranks on five virtual hosts: the weights of one serial rank, on every rank, in every run."""

import json
import sys
from pathlib import Path

import pytest

from tests.suites.test_virtual_cluster import needs_cluster, run
from tests.support.cluster_training import SPLITTING, all_cases

pytestmark = pytest.mark.any_mpi

PROGRAM = Path(__file__).parents[1] / "support" / "cluster_training.py"
HOSTS = ["--nodes", 5, "--ranks", 9, "--ranks-per-node", 2, "--rate", "10gbit"]
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


@pytest.fixture(scope="module")
def result():
    """Of all strategies, by one launch: nine ranks take longer to start than to train."""
    ended = run("run", *HOSTS, command=[sys.executable, str(PROGRAM)])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads(ended.stdout.partition("RESULT ")[2].splitlines()[0])


@needs_cluster
def test_nine_ranks_on_five_hosts_share_no_even_vector(result):
    assert result["nodes"] == 5
    assert result["parameters"] % 9


@needs_cluster
@pytest.mark.parametrize(("name", "options"), list(all_cases(9)), ids=str)
def test_every_strategy_is_one_serial_rank(result, name, options):
    outcome = result["outcomes"][f"{name} {options}"]
    assert outcome["same_everywhere"], "ranks hold different bits"
    assert outcome["same_again"], "a second run gives other bits"
    wire = options.get("wire", "float32")
    assert outcome["error"] < TOLERANCE[wire]
    assert wire == "float32" or outcome["error"] > 1e-6, "nothing was rounded"


@needs_cluster
@pytest.mark.parametrize("name", SPLITTING)
def test_a_split_embedding_gives_the_same_weights(result, name):
    assert 0 < result["splits"][name] < 1e-6
