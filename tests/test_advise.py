"""advise.py: the table and the object it prints, and what it says to bad input."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"
CASE = ["--nodes", "5", "--ranks", "9", "--ranks-per-node", "2", "--link", "400mbit", "--latency", "100us"]
CASE += ["--parameters", "2M", "--compute-ms", "100"]
WITHOUT_MPI = """
import runpy, sys
sys.modules["mpi4py"] = None
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv.pop(0))
runpy.run_path(sys.argv[0], None, "__main__")
"""


def run(*arguments):
    command = [sys.executable, "-c", WITHOUT_MPI, SCRIPTS, SCRIPTS / "advise.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=SCRIPTS.parent)


def answer(*arguments):
    result = run(*arguments, "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_help_needs_no_mpi():
    result = run("--help")
    assert result.returncode == 0, result.stderr
    assert "--compute-ms" in result.stdout


def test_table_and_object_agree():
    report, lines = answer(*CASE), run(*CASE).stdout.splitlines()
    rows = report["strategies"]
    assert [line.split()[0] for line in lines[2 : 2 + len(rows)]] == [row["strategy"] for row in rows]
    assert lines[-1] == report["advice"]
    for line, row in zip(lines[2:], rows, strict=False):
        exchange_ms = float(line.split()[1])
        assert exchange_ms == pytest.approx(1e3 * row["exchange_s"], rel=0.01)


def test_five_hosts():
    """The case of the port counters: 27 MB into the server's node, 12.8 = the bound on a ring of leaders."""
    rows = {row["strategy"]: row for row in answer(*CASE)["strategies"]}
    assert rows["reduce-bcast"]["bytes_in"] == pytest.approx(27e6, rel=0.02)
    assert rows["sliced"]["bytes_in"] == pytest.approx(29e6, rel=0.02)
    assert rows["hierarchical"]["bytes_in"] == pytest.approx(12.8e6, rel=1e-5)
    assert rows["hierarchical"]["times_bound"] == pytest.approx(1.05, abs=0.01)
    assert rows["ring"]["times_bound"] == pytest.approx(1.16, abs=0.01)
    dedicated = rows["reduce-bcast/dedicated"]
    assert dedicated["exchange_s"] == rows["reduce-bcast"]["exchange_s"]
    assert dedicated["step_s"] == pytest.approx(dedicated["exchange_s"] + 0.1 * 9 / 8)


def test_rows_are_sorted_by_step():
    rows = answer(*CASE)["strategies"]
    steps = [row["step_s"] if row["step_overlapped_s"] is None else row["step_overlapped_s"] for row in rows]
    assert steps == sorted(steps)


def test_overlap_hides_what_computing_leaves_room_for():
    """8 MB, an exchange of 268 ms: two thirds of the computing hide so much, all but the last eighth at most."""
    for compute_ms in (0, 100, 10_000):
        report = answer(*CASE[:-1], str(compute_ms))
        row = next(row for row in report["strategies"] if row["strategy"] == "hierarchical")
        hidden = row["step_s"] - row["step_overlapped_s"]
        most = min(compute_ms / 1e3 * 2 / 3, row["exchange_s"])
        assert hidden == pytest.approx(max(0.0, most - row["exchange_s"] / 8))


def test_half_the_bytes_with_bfloat16():
    whole, half = (answer(*CASE, "--wire", wire)["strategies"] for wire in ("float32", "bfloat16"))
    bytes_in = [{row["strategy"]: row["bytes_in"] for row in rows} for rows in (whole, half)]
    for strategy in ("ring", "hierarchical", "allreduce", "zero-3"):
        assert bytes_in[1][strategy] == pytest.approx(bytes_in[0][strategy] / 2, rel=1e-5)


def test_one_node():
    report = answer("--nodes", "1", "--ranks", "4", "--link", "10gbit", "--parameters", "124M", "--compute-ms", "50")
    assert all(row["bytes_in"] == 0 and row["times_bound"] is None for row in report["strategies"])
    assert "One node" in report["advice"]


def test_one_rank():
    report = answer("--nodes", "1", "--link", "10gbit", "--parameters", "124M", "--compute-ms", "50")
    assert all(row["exchange_s"] == 0 for row in report["strategies"])


def test_thousands_of_nodes():
    large = ["--nodes", "4096", "--ranks-per-node", "8", "--link", "200gbit", "--latency", "3us"]
    large += ["--parameters", "1.5B"]
    report = answer(*large, "--compute-ms", "400", "--transport", "rdma", "--memory-rate", "300")
    assert len(report["strategies"]) == 11
    rows = {row["strategy"]: row for row in report["strategies"]}
    assert rows["hierarchical"]["times_bound"] < rows["ring"]["times_bound"] < rows["reduce-bcast"]["times_bound"]


def test_an_unknown_choice_is_a_dash_and_a_reason():
    arguments = [
        "--nodes",
        "9",
        "--link",
        "10gbit",
        "--parameters",
        "124M",
        "--compute-ms",
        "50",
        "--library",
        "openmpi",
    ]
    result = run(*arguments)
    assert result.returncode == 0
    assert "reduce-scatter: openmpi's reduce_scatter_block" in result.stdout
    row = answer(*arguments)["strategies"][-1]
    assert row["strategy"] == "reduce-scatter"
    assert row["step_s"] is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--link", "fast"], "'fast' is no rate"),
        (["--latency", "soon"], "'soon' is no time"),
        (["--parameters", "124X"], "'124X' is no count"),
        (["--parameters", "0"], "'0' is no count"),
        (["--compute-ms", "-1"], "expected 0 or more"),
        (["--compute-ms", "nan"], "expected 0 or more"),
        (["--ranks", "12"], "expected 9 to 10 ranks"),
        (["--nodes", "0"], "expected 1 or more"),
        (["--nodes", "2000000", "--ranks", "4000000"], "at most"),
        (["--memory-rate", "0"], "expected more than 0"),
    ],
)
def test_mistakes_are_one_line(change, said):
    result = run(*CASE, *change)
    assert result.returncode == 2
    assert result.stderr.startswith("advise.py: error: ")
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
