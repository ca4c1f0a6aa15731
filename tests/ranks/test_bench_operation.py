"""bench_operation.py: a line for each collective, what the library calls, and wrong sums."""

import json
import sys
from pathlib import Path

import pytest

from dist.mpi import MPI
from scripts import bench_operation
from tests.support.launch import launch

BENCH = Path(__file__).parents[2] / "scripts" / "bench_operation.py"


@pytest.mark.any_mpi
def test_the_command(tmp_path):
    file = tmp_path / "operation.json"
    flags = ["--bytes", "64KB,1KB", "--repeat", "1", "--threads", "1", "--json", str(file)]
    result = launch(3, [sys.executable, str(BENCH), *flags])
    assert result.returncode == 0, result.stderr
    report = json.loads(file.read_text())
    assert [(row["collective"], row["bytes"] >= 64_000) for row in report["rows"]] == [
        (name, large) for large in (True, False) for name in bench_operation.COLLECTIVES
    ]
    *lines, errors = result.stdout.splitlines()[1:]
    assert errors.startswith("relative error of a sum in bfloat16: Reduce 0.00")
    assert report["errors"].keys() == {*bench_operation.COLLECTIVES, "ring"}
    assert all(1e-3 < error < 1e-2 for error in report["errors"].values())
    for row, line in zip(report["rows"], lines, strict=True):
        assert line.split()[0] == row["collective"]
        assert min(row["seconds"].values()) > 0
        assert 0 < len(row["calls"]) <= 3
        assert all(0 < length <= row["bytes"] for length in row["calls"])


@pytest.mark.ranks(1, 2, 3)
def test_a_wrong_sum_is_seen(comm):
    from dist.world import start_world

    for collective in bench_operation.COLLECTIVES:
        assert bench_operation.seconds_of(start_world(), collective, 48, MPI.SUM, rounds=False) > 0
        if comm.size == 1:
            continue
        wrong = False
        try:
            bench_operation.seconds_of(start_world(), collective, 48, MPI.MAX, rounds=False)
        except AssertionError as error:
            wrong = f"{collective} of 48 elements: wrong sums" in str(error)
        assert comm.allreduce(wrong, MPI.LOR)


@pytest.mark.any_mpi
def test_mistakes(tmp_path):
    for flags, says in ((["--threads", "0"], "--threads"), (["--json", str(tmp_path / "no" / "a.json")], "no")):
        result = launch(2, [sys.executable, str(BENCH), *flags])
        assert result.returncode == 2
        assert says in result.stderr
        assert "Traceback" not in result.stderr
