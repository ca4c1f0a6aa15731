"""bench_parts.py: a line for each size, and wrong sums."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from scripts import bench_parts
from tests.support.launch import launch

BENCH = Path(__file__).parents[2] / "scripts" / "bench_parts.py"


def test_the_command(tmp_path):
    file = tmp_path / "parts.json"
    flags = ["--bytes", "1KB,100KB", "--repeat", "2", "--calls", "2", "--json", str(file)]
    result = launch(2, [sys.executable, str(BENCH), *flags])
    assert result.returncode == 0, result.stderr
    report = json.loads(file.read_text())
    assert [row["bytes"] for row in report["rows"]] == [1024, 100_096]
    heading, *lines = result.stdout.splitlines()
    assert heading.endswith("MPI / in place")
    assert lines[-1].startswith("2 ranks, ")
    for row, line in zip(report["rows"], lines, strict=False):
        assert min(row["seconds"].values()) > 0
        assert line.split()[-1] == f"{row['ratio']:.2f}"


@pytest.mark.ranks(2)
def test_a_wrong_sum_is_seen(comm):
    from dist.world import start_world

    total = np.zeros((3, 64), np.float32)
    bench_parts.fill(total.reshape(-1), bench_parts.summed_values([True, True]))
    bench_parts.check(start_world(), "in place", total)
    total[2, 63] += 1
    with pytest.raises(AssertionError, match="in place, 768 bytes: wrong sums"):
        bench_parts.check(start_world(), "in place", total)
