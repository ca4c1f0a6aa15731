"""doctor.py on invented jobs: what several findings come to, facts that are missing, and the report."""

import pytest

from scripts.checkup.facts import RankFacts
from scripts.checkup.report import FAIL, NOTE, SLOW, as_text, find_problems, table, verdict
from scripts.doctor import CHECKS
from scripts.machine.names import rank_numbers
from tests.support.doctor_job import ALL_CORES, GB, NO_GPU, NODE_1, change, error, healthy, rank_facts


def test_without_a_model_sizes_are_notes():
    ranks = healthy()
    change("shared memory/free", 64 << 20, 0)(ranks)
    change("run folder/free", GB // 2)(ranks)
    change("memory/free", 1 << 20)(ranks)
    assert [(finding.severity, finding.about) for finding in find_problems(CHECKS, ranks)] == [(NOTE, "shared memory")]


def test_what_fails_comes_first():
    ranks = healthy()
    change("shared memory/left", [["/dev/shm/mpich_shm_1_0", GB]], *NODE_1)(ranks)
    change("speed", 1e9, 5)(ranks)
    change("run folder/problem", "No space")(ranks)
    findings = find_problems(CHECKS, ranks)
    assert [finding.severity for finding in findings] == [FAIL, SLOW, NOTE]
    assert verdict(findings, ranks[0]["place"]) == "8 ranks on 4 nodes: training will fail: run folder"
    assert verdict(findings[1:], ranks[0]["place"]).endswith("slower than it could: speed")


@pytest.mark.parametrize("section", [key for key in rank_facts(0) if key not in ("place", "errors")])
def test_a_missing_section_stops_no_check(section):
    """Of one rank or all: only what cannot be looked at is said, and the report is still printed."""
    for where in ((1,), (2,), ()):
        ranks = healthy()
        error(section, "ValueError: odd", *where)(ranks)
        findings = find_problems(CHECKS, ranks, "gpt2-124M")
        assert [finding.about for finding in findings] == [section], findings
        assert findings[0].severity == (FAIL if section == "MPI" else NOTE)
        assert as_text(ranks, findings).splitlines()[-1].startswith("verdict: 8 ranks on 4 nodes: ")


def test_a_check_that_raises_is_a_finding():
    ranks = healthy()
    change("speed", "fast")(ranks)
    (finding,) = find_problems(CHECKS, ranks)
    assert (finding.severity, finding.about) == (NOTE, "doctor")
    assert "speed ended with TypeError" in finding.text
    assert "not every check could be made" in verdict([finding], ranks[0]["place"])


def test_crowded_ranks_are_not_called_slow():
    """On shared cores a rank's rate says who had the core."""
    ranks = healthy(nodes=1, ranks_per_node=4)
    for rank, facts in enumerate(ranks):
        facts["cores"] = {**ALL_CORES, "affinity": [0, 1], "count": 2}
        facts["speed"] = 90e9 if rank else 30e9
        facts["own GPU"] = NO_GPU
        facts["GPUs"]["listed"] = []
    assert [finding.text for finding in find_problems(CHECKS, ranks)] == ["4 ranks share 2 cores of node0"]


def test_words():
    assert rank_numbers((5, 0, 1, 2)) == "0-2 and 5"
    assert rank_numbers((0, 2, 4)) == "0, 2 and 4"
    assert RankFacts(healthy(nodes=9)).hosts == "node0, node1, node2 and 6 more hosts"
    rows = table([["a", "b"]] + [[str(number), "x" * number] for number in range(50)])
    assert rows[0] == "a   b"
    assert rows[-1] == "... and 10 more: --json has all"


def test_the_report_of_a_large_job():
    """Every table, with what a reader looks for."""
    text = as_text(healthy(nodes=64), [])
    for words in ("node0   0-1    8", "mlx5_0:1", "13010, 13000", "more: --json has all"):
        assert words in text, words
    assert text.splitlines()[-1] == "verdict: 128 ranks on 64 nodes: nothing found that would fail or be slow"
