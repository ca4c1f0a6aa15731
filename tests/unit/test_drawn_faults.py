"""Clusters and faults are drawn as the suite says, the same from the same seed; its rows become the page's table."""

import random
from collections import Counter

import pytest

from scripts.makers.pages.faults import drawn_block
from tests.suites import drawn_faults
from tests.suites.drawn_faults import Drawn, draw, judge, summary


def test_a_seed_draws_the_same_again_and_all_there_is():
    drawn = [draw(random.Random(seed), None) for seed in range(400)]
    assert drawn[:5] == [draw(random.Random(seed), None) for seed in range(5)]
    kinds = Counter(one.kind for one in drawn)
    assert 100 < kinds[None] < 220
    assert 100 < kinds["slow-link"] < 220
    assert min(kinds["straggler"], kinds["data"]) > 10
    assert {one.nodes for one in drawn} == set(range(3, 9))
    assert {one.direction for one in drawn} == {None, "in", "out", "both"}
    assert {(one.model, one.strategy) for one in drawn} == {
        (model, strategy)
        for model in ("small", "larger")
        for strategy in ("reduce-bcast", "reduce-scatter", "hierarchical-sharded")
    }
    assert all(one.is_worth_a_run() and sum(one.placement) <= 10 for one in drawn)
    assert min(one.rate for one in drawn) < 30e6 < 300e6 < max(one.rate for one in drawn)


def test_a_model_like_gpt2_always_has_a_case():
    """Of the faults that its steps would notice."""
    drawn = [draw(random.Random(seed), "gpt2") for seed in range(200)]
    assert {one.kind for one in drawn} == {None, "slow-link", "straggler"}
    assert {one.placement for one in drawn} == {(2, 2, 2, 2, 1)}


def drawn_as(kind, **more) -> Drawn:
    facts = {"model": "small", "strategy": "reduce-bcast", "nodes": 3, "placement": (2, 1, 1), "rate": 1e8}
    facts |= {"burst": 1e5, "node": None, "rank": None, "direction": None, "slowdown": 1.0, "kind": kind}
    return Drawn(**facts | more)


def test_a_cases_flags():
    case = drawn_as("slow-link", node=1, direction="in", slowdown=0.25).case()
    assert (case.starts, case.train[0]) == (1, "--strategy")
    assert (case.slow, case.fault, case.ranks, case.nodes) == (("node1:in:25000kbit",), "nothing", 4, 3)
    assert case.cluster == ("--burst", "100000", "--first-node", 2)
    assert drawn_as("data", node=0, rank=1).case().fault == "starved-rank:1"
    assert drawn_as("straggler", node=0, rank=1, placement=(2, 2, 1)).case().cluster[2:] == ("--ranks-per-node", 2)


@pytest.mark.parametrize(
    ("kind", "node", "strategy", "is_right"),
    [
        ("network-congestion", None, "ring", True),
        ("server-hotspot", 0, "reduce-bcast", True),
        ("server-hotspot", 1, "reduce-bcast", False),
        ("server-hotspot", 0, "ring", False),
        ("slow-link", 0, "reduce-bcast", False),
        ("straggler", 0, "ring", False),
    ],
)
def test_who_accuses_a_healthy_run(monkeypatch, tmp_path, kind, node, strategy, is_right):
    found = {"kind": kind, "node": node, "right": False, "verdict": "this"}
    monkeypatch.setattr(drawn_faults, "verdict_on", lambda case, folder: found)
    row = judge(drawn_as(None, strategy=strategy), 1, tmp_path)
    assert (row["right"], row["accused"]) == (is_right, not is_right)


def test_the_page_has_every_miss():
    rows = []
    for kind, direction, right in ((None, None, True), (None, None, False), ("slow-link", "in", True)):
        drawn = {"kind": kind, "direction": direction}
        rows.append({"drawn": drawn, "found": {"verdict": "a verdict"}, "right": right, "accused": not right})
    made_on = {"processor": "P", "cores": 2, "mpi": "M"}
    block = drawn_block({"MPICH": {"seed": 7, "summary": summary(rows), "made_on": made_on, "rows": rows}})
    lines = block.splitlines()
    assert lines[2:4] == ["| a slow port, in | 1 of 1 |", "| nothing | 1 of 2 |"]
    assert lines[5] == "MPICH: 2 of 3 runs right; of 2 healthy ones 1 accused. Seed 7."
    assert lines[6:] == ["- missed: nothing, `a verdict`", "", "Measured on P, 2 cores, M."]
