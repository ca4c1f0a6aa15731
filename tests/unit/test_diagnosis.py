"""The verdict on runs with one known fault each, on their neighbours, and what diagnose.py prints."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from scripts.diagnose import main
from scripts.reports.verdict import as_text, diagnose
from tests.support.faulty_runs import make
from tests.support.make_run import three_ranks, write_run
from traces import RunError, read_run
from traces.record.files import trace_path
from traces.units import bytes_text
from traces.verdict.network_rules import link_ratios
from traces.verdict.rank_rules import against_others, stall_seconds
from traces.verdict.titles import SHOWN_IN

SCRIPTS = Path(__file__).parents[2] / "scripts"
QUARTER = 12.5e6
FAST = 500e6


def said(folder, **changes):
    """(kind, node, rank, direction) of the verdict on the run."""
    found = diagnose(make(folder, **changes))["bottleneck"]
    return found["kind"], found["node"], found["rank"], found["direction"]


NOBODY = (None, None, None)
TENSOR = {"mesh": (1, 2, 1), "tau_ms": (30,), "layers": None, "tensor_ms": 12.0}
CASES = {
    "few micro-steps": ({"mesh": (1, 1, 4), "micro_steps": 2}, ("pipeline-bubble", *NOBODY)),
    "a long stage": (
        {"mesh": (1, 1, 4), "micro_steps": 16, "tau_ms": (30, 30, 30, 60)}, ("stage-imbalance", *NOBODY),
    ),
    "parts of a small model": (TENSOR, ("tensor-exchange", *NOBODY)),
    "clean": ({"rate": FAST}, ("compute-bound", *NOBODY)),
    "clean, sharded": ({"rate": FAST, "strategy": "hierarchical-sharded"}, ("compute-bound", *NOBODY)),
    "clean, little computing": ({}, ("network-congestion", *NOBODY)),
    "slow port in": ({"ports": {(2, "in"): QUARTER}}, ("slow-link", 2, None, "in")),
    "slow port out": ({"ports": {(3, "out"): QUARTER}}, ("slow-link", 3, None, "out")),
    "slow port": ({"ports": {(1, "in"): QUARTER, (1, "out"): QUARTER}}, ("slow-link", 1, None, None)),
    "slow port of a server": (
        {"strategy": "reduce-bcast", "ports": {(0, "in"): QUARTER}}, ("slow-link", 0, None, "in"),
    ),
    "slow port beside a server": (
        {"strategy": "reduce-bcast", "ports": {(3, "in"): QUARTER}}, ("slow-link", 3, None, "in"),
    ),
    "server": ({"strategy": "reduce-bcast"}, ("server-hotspot", 0, None, "in")),
    "all ports slow": ({"rate": 5e6}, ("network-congestion", *NOBODY)),
    "slow rank": ({"slow": {5: 2.0}}, ("straggler", 3, 5, None)),
    "slow rank, fast ports": ({"slow": {5: 2.0}, "rate": FAST}, ("straggler", 3, 5, None)),
    "slow rank at a server": ({"slow": {5: 2.0}, "strategy": "reduce-bcast"}, ("straggler", 3, 5, None)),
    "slow node": ({"slow": {3: 1.8, 4: 1.9}}, ("straggler", 2, None, None)),
    "uneven work": ({"slow": {1: 1.6, 3: 1.8, 6: 1.7}, "rate": FAST}, ("imbalance", *NOBODY)),
    "most ranks slow": ({"slow": dict.fromkeys(range(2, 9), 1.8), "rate": FAST}, ("imbalance", *NOBODY)),
    "starved rank": ({"data_ms": {2: 200.0}}, ("data", 1, 2, None)),
    "starved ranks": ({"data_ms": dict.fromkeys(range(9), 80.0), "rate": FAST}, ("data", *NOBODY)),
    "stalling rank": ({"stall": (4, 20, 1000.0)}, ("straggler", 2, 4, None)),
    "stalling rank, fast ports": ({"stall": (4, 20, 1000.0), "rate": FAST}, ("straggler", 2, 4, None)),
    "small messages": (
        {"vector": 600.0 * 40, "calls": 40, "compute_ms": 10.0, "steps": 12}, ("latency-bound", *NOBODY),
    ),
    "small vector": ({"vector": 10_000.0, "compute_ms": 1.0}, ("latency-bound", *NOBODY)),
    "slow port without counters": ({"ports": {(2, "in"): QUARTER}, "counted": False}, ("slow-link", 2, None, "in")),
    # The port was disturbed while it was probed: in the run it carries as much as the others.
    "probe that the run contradicts": ({"probed": {(2, "in"): QUARTER}}, ("network-congestion", *NOBODY)),
    "rank slower by a fifth": ({"slow": {6: 1.2}, "rate": FAST}, ("straggler", 3, 6, None)),
    "slower of two ranks": ({"nodes": [0, 1], "slow": {1: 1.5}, "rate": FAST}, ("straggler", 1, 1, None)),
    # A stall that does not come again.
    "one slow step": ({"stall": (4, 30, 1000.0), "rate": FAST}, ("compute-bound", *NOBODY)),
    "one rank": ({"nodes": [0], "strategy": "none"}, ("compute-bound", *NOBODY)),
    # Rank 0 computes nothing; that makes the others neither slow nor uneven.
    "dedicated server": ({"strategy": "reduce-bcast", "slow": {0: 0.0}}, ("server-hotspot", 0, None, "in")),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_verdict_names_the_fault(case, tmp_path):
    changes, expected = CASES[case]
    assert said(tmp_path, **changes) == expected


@pytest.mark.parametrize("kind", SHOWN_IN)
def test_every_kind_is_provoked_and_explained(kind):
    provoked = {expected[0] for _, expected in CASES.values()} | {"none"}
    assert kind in provoked, "add a run that has it to CASES, and its neighbours"
    page = (SCRIPTS.parent / "docs" / "diagnosis.md").read_text()
    assert f"\n| `{kind}` |" in page, "say in the table of kinds in docs/diagnosis.md what it means"


@pytest.mark.parametrize("seed", range(1, 7))
def test_a_clean_run_accuses_nobody(seed, tmp_path):
    rate = FAST if seed % 2 else 50e6
    assert said(tmp_path, seed=seed, rate=rate)[1:] == NOBODY


def test_a_sender_that_looks_faster_than_its_port_slows_nobody(tmp_path):
    probed = {(node, "out"): 3e9 for node in range(5)} | {(4, "out"): 50e6}
    assert said(tmp_path, probed=probed, counted=False) == ("network-congestion", *NOBODY)
    links = [{"in": 50e6, "out": 3e9}, {"in": 50e6, "out": 50e6}, {"in": 10e6, "out": 3e9}]
    assert link_ratios(links)["in"] == pytest.approx([5 / 3, 5 / 3, 0.2])


def test_a_slow_ports_neighbour_is_not_taken_for_it(tmp_path):
    """Its probe suffered one way, more than the slow port's own, which suffered both ways."""
    ports = {(1, "in"): QUARTER, (1, "out"): QUARTER}
    assert said(tmp_path, ports=ports, probed={(0, "in"): 0.9 * QUARTER}, counted=False)[:2] == ("slow-link", 1)


def test_of_two_nodes_the_link_is_named(tmp_path):
    answer = diagnose(make(tmp_path, nodes=[0, 0, 1, 1], ports={(0, "out"): QUARTER, (1, "in"): QUARTER}))
    assert answer["bottleneck"]["kind"] == "slow-link"
    assert answer["bottleneck"]["node"] is None
    assert "the link out of cn00 carries" in answer["verdict"]


def test_the_costlier_of_two_faults_comes_first(tmp_path):
    """A slow port and a slow rank, once the one and once the other worse."""
    port = {(2, "in"): QUARTER}
    both = diagnose(make(tmp_path / "port", ports=port, slow={7: 2.0}))
    assert (both["bottleneck"]["kind"], both["evidence"]["also"][0]["kind"]) == ("slow-link", "straggler")
    both = diagnose(make(tmp_path / "rank", ports=port, slow={7: 4.0}, compute_ms=900.0))
    assert (both["bottleneck"]["kind"], both["evidence"]["also"][0]["kind"]) == ("straggler", "slow-link")


# --- what is printed ---


def test_the_sentence_can_be_acted_on(tmp_path):
    answer = diagnose(make(tmp_path, strategy="reduce-bcast"))
    assert answer["verdict"].startswith(
        "cn00 receives 33 MB a step through a port that carries 49.8 MB/s: reduce takes"
    )
    assert "hierarchical-sharded would take" in answer["verdict"]
    stalls = diagnose(make(tmp_path / "stalls", stall=(4, 20, 1000.0)))["verdict"]
    assert "rank 4 on cn02 stalls once in 20 steps for 1.00 s in forward" in stalls


def test_the_object_is_what_the_design_says(tmp_path, capsys):
    run = make(tmp_path, strategy="reduce-bcast")
    assert main(["--json", str(tmp_path)]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert list(answer) == ["verdict", "bottleneck", "evidence", "advice"]
    assert list(answer["bottleneck"]) == ["kind", "phase", "node", "rank", "direction", "share"]
    assert answer["bottleneck"]["kind"] in SHOWN_IN
    assert 0 < answer["bottleneck"]["share"] <= 1
    assert answer == json.loads(json.dumps(diagnose(run)))
    steps = [row["predicted_step_s"] for row in answer["advice"]]
    assert steps == sorted(steps)
    assert "reduce-bcast" not in [row["strategy"] for row in answer["advice"]]
    for row in answer["advice"]:
        assert list(row) == [
            "strategy",
            "predicted_step_s",
            "speedup",
            "range_s",
            "memory_bytes",
            "compared",
            "same_weights",
        ]
        assert row["speedup"] == pytest.approx(answer["evidence"]["step_s"] / row["predicted_step_s"])


def test_the_script_needs_no_mpi(tmp_path):
    """mpi4py cannot be imported there."""
    make(tmp_path, steps=6)
    without = "import runpy, sys; sys.modules['mpi4py'] = None; sys.argv = sys.argv[1:]; "
    without += "runpy.run_path(sys.argv[0], None, '__main__')"
    command = [sys.executable, "-c", without, SCRIPTS / "diagnose.py", tmp_path]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=SCRIPTS.parent)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("up to 16 MB a step enter")


def test_the_text_begins_with_the_verdict(tmp_path):
    answer = diagnose(make(tmp_path))
    lines = as_text(answer).splitlines()
    assert lines[0] == answer["verdict"]
    assert lines[2] == f"network-congestion: {answer['bottleneck']['share']:.0%} of the step; seen in allreduce"
    assert sum(line.startswith("cn0") for line in lines) == 5
    amounts, link = (answer["evidence"]["nodes"][3][name]["in"] for name in ("bytes_a_step", "link_bytes_per_s"))
    assert f"in {bytes_text(amounts)} a step, link {bytes_text(link)}/s; out" in next(
        line for line in lines if line.startswith("cn03")
    )
    assert bytes_text(amounts) != bytes_text(link)
    assert any(line.startswith("efficiency") for line in lines)
    evidence = answer["evidence"]
    assert any(line.endswith(f"; {evidence['tokens_per_s']:,.0f} tokens/s") for line in lines)
    with_mfu = as_text(answer | {"evidence": evidence | {"tokens_per_s": 12_345.6, "mfu": 0.404}})
    assert "; 12,346 tokens/s, MFU 40%\n" in with_mfu


# --- thin evidence and broken runs ---


def test_thin_evidence_is_said(tmp_path):
    answer = diagnose(make(tmp_path, steps=3, counted=False))
    assert "only 3 steps measured" in answer["verdict"]
    assert "no node counters" in answer["verdict"]
    assert diagnose(make(tmp_path / "thick"))["evidence"]["thin"] == []


def test_a_run_with_ranks_missing_is_diagnosed(tmp_path):
    make(tmp_path, ports={(2, "in"): QUARTER})
    trace_path(tmp_path / "traces", 7).unlink()
    answer = diagnose(read_run(tmp_path, allow_missing=True))
    assert answer["bottleneck"]["kind"] == "slow-link"
    assert "lacks 1 of 9 ranks' files (rank-00007.trace)" in answer["verdict"]


def test_a_run_without_its_config_is_diagnosed(tmp_path, capsys):
    make(tmp_path, slow={5: 2.0})
    (tmp_path / "config.json").unlink()
    main(["--json", str(tmp_path)])
    answer = json.loads(capsys.readouterr().out)
    assert (answer["bottleneck"]["kind"], answer["bottleneck"]["rank"]) == ("straggler", 5)
    assert "config.json is missing" in answer["verdict"]
    assert answer["advice"] == []


def test_a_rank_that_ended_early_shortens_the_run(tmp_path):
    """A crash: of rank 3 ten steps are there, and a torn record."""
    make(tmp_path)
    path = trace_path(tmp_path / "traces", 3)
    records = read_run(tmp_path).ranks[3].records
    kept = int(np.flatnonzero(records["step"] == 11)[0])
    header = path.read_bytes().index(b"\n") + 1
    path.write_bytes(path.read_bytes()[: header + kept * 36 + 17])
    answer = diagnose(read_run(tmp_path, allow_missing=True))
    assert answer["evidence"]["steps"] == 8


@pytest.mark.parametrize("left", ["nothing", "no step"])
def test_what_cannot_be_diagnosed_is_one_line(left, tmp_path, capsys):
    spans = three_ranks(3)
    if left == "no step":
        spans = [[span for span in rank if span[1] != "step"] for rank in spans]
    run = write_run(tmp_path / "run", spans, [0, 0, 1], log=[])
    if left == "nothing":
        for path in (*run.glob("traces/*"), run / "config.json", run / "log.jsonl"):
            path.unlink()
    assert main([str(run)]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("diagnose.py: error: ")
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_no_folder_is_one_line(tmp_path):
    with pytest.raises(RunError, match="not a folder"):
        read_run(tmp_path / "nowhere", allow_missing=True)
    assert main([str(tmp_path / "nowhere")]) == 2


# --- the rules' arithmetic ---


def test_a_rank_against_the_others():
    ratio, excess = against_others(np.array([[1.0, 2.0, 3.0, 8.0]]))
    assert ratio == pytest.approx(np.array([[1 / 3, 2 / 3, 3 / 2, 4.0]]))
    assert excess == pytest.approx(np.array([[-2, -1, 1, 6.0]]))


def test_stalls_are_what_no_other_rank_shares():
    own = np.full((10, 4), 0.1)
    own[3] += 0.5  # the machine stood still
    own[7, 2] += 0.4
    expected = np.zeros((10, 4))
    expected[7, 2] = 0.4
    assert stall_seconds(own, step_s=0.2) == pytest.approx(expected)
