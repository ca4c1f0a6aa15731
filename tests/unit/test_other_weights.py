"""Strategies that give other weights: predicted and marked, with their price; never chosen, never advised first."""

from dataclasses import replace

import pytest

from dist.cost.messages import sums_of_nodes
from dist.cost.model import Cluster
from dist.cost.overlap import Training
from dist.wire import WIRE_BYTES
from gpt2.errors import UserError
from scripts import advise
from scripts.prediction.predictor import WORTH_OTHER_WEIGHTS, advice_sentence, as_rows, other_weights, predicted_steps
from scripts.prediction.replayed_run import advise_from_run
from scripts.prediction.shapes import advise_shapes
from scripts.reports.verdict import as_text, diagnose
from strategies import STRATEGIES, candidates
from strategies.ring import Ring
from tests.unit.test_advised_shapes import BABY, cluster, workload
from tests.unit.test_calibration import made_run
from traces import read_run
from traces.read.analysis import measure
from traces.verdict.diagnosis import Diagnosis, find_bottleneck
from traces.verdict.evidence import Finding

TENTH = """
from strategies.ring import Ring
class Thin(Ring):
    traits = Ring.traits.changed(same_weights=False)
"""
SECOND = "thin would make a step "


def a_tenth(setting):
    return sums_of_nodes(replace(setting, elements=setting.elements // 10))


@pytest.fixture
def thin(monkeypatch):
    """The registry's only strategy with other weights: it sends a tenth, and declares that auto may take it."""
    for name in [name for name, kind in STRATEGIES.items() if not kind.traits.same_weights]:
        monkeypatch.delitem(STRATEGIES, name)
    kind = type("Thin", (Ring,), {"name": "thin", "traits": Ring.traits.changed(same_weights=False, messages=a_tenth)})
    monkeypatch.setitem(STRATEGIES, "thin", kind)
    return kind


def rows_of(nodes: int, compute_s: float) -> list[dict]:
    cluster = Cluster(range(nodes), 5e7, 5e7, 1e-4)
    training = Training(1_000_000, compute_s)
    return as_rows(predicted_steps(cluster, training, "mpich"), cluster, training)


def test_rounding_errors_take_memory():
    """Of the strategies that send int8; the others keep float32."""
    rounded, exact = (
        {step.name: step.memory.total for step in predicted_steps(Cluster(range(4), 5e7, 5e7, 1e-4), training, "mpich")}
        for training in (Training(1000, 0.1, item_bytes=WIRE_BYTES["int8"]), Training(1000, 0.1))
    )
    more = {name: rounded[name] - exact[name] for name in exact}
    assert {name: count for name, count in more.items() if count} == {"hierarchical": 4000, "diloco": 4000}


@pytest.mark.parametrize("device", ["host", "gpus"])
def test_auto_never_takes_them(thin, device, tmp_path):
    assert device in thin.traits.auto
    assert all(kind.traits.same_weights for kind in candidates("auto", device).values())
    file = tmp_path / "thin.py"
    file.write_text(TENTH)
    with pytest.raises(UserError, match="is approximate"):
        candidates(f"auto:{file}", device)


@pytest.mark.usefixtures("thin")
def test_the_table_marks_them_and_the_advice_begins_with_another():
    rows = rows_of(4, 0.01)
    assert rows[0]["strategy"] == "thin"
    assert [row["strategy"] for row in rows if not row["same_weights"]] == ["thin"]
    first, second = advice_sentence(rows).split(". ", 1)[0], advice_sentence(rows).partition(SECOND)[2]
    assert first.startswith("Take hierarchical")
    assert "thin" not in first
    times = min(row["step_overlapped_s"] or row["step_s"] for row in rows[1:]) / rows[0]["step_overlapped_s"]
    assert float(second.split()[0]) == pytest.approx(times, rel=0.05)
    assert "only a trial shows how much loss that costs" in second
    lines = advise.table(rows).splitlines()
    assert lines[2].startswith("thin* ")
    assert lines[-1].startswith("* approximate: ")


@pytest.mark.usefixtures("thin")
def test_a_small_gain_is_not_worth_other_weights():
    assert SECOND not in advice_sentence(rows_of(4, 10.0))
    rows = [{"strategy": "thin", "same_weights": False, "step_s": 1.0, "step_overlapped_s": None}]
    assert other_weights(rows, WORTH_OTHER_WEIGHTS - 0.01) == []
    assert other_weights(rows, WORTH_OTHER_WEIGHTS + 0.01)[0].startswith(f"{SECOND}1.3 times shorter")
    assert advice_sentence(rows).startswith("No advice: ")


@pytest.mark.usefixtures("thin")
def test_a_congestion_verdict_names_their_price(tmp_path):
    run = read_run(made_run(tmp_path / "run", "ring"))
    answer = diagnose(run)
    assert answer["bottleneck"]["kind"] == "network-congestion"
    assert answer["advice"][0]["strategy"] == "thin"
    assert [row["strategy"] for row in answer["advice"] if not row["same_weights"]] == ["thin"]
    assert answer["evidence"]["model"]["advised"] is None
    before, _, price = answer["verdict"].partition(f"; {SECOND}")
    assert "thin" not in before
    assert "only a trial shows" in price
    assert "faster: thin* " in as_text(answer)
    assert "* approximate: " in as_text(answer)
    report = advise_from_run(run.path, None, None, None, None)
    assert report["advice"].startswith("Take hierarchical-sharded: ")
    assert f". {SECOND}" in report["advice"]


@pytest.mark.usefixtures("thin")
def test_a_slow_link_is_repaired_first(tmp_path):
    run = read_run(made_run(tmp_path / "run", "ring"))
    evidence = find_bottleneck(run, measure(run)).evidence
    for kind in ("slow-link", "latency-bound", "straggler"):
        verdict = Diagnosis(Finding(kind, 1.0, "", kind), [], evidence).verdict([], {"with_other_weights": ["thin"]})
        assert ("; thin" in verdict) == (kind == "latency-bound")


@pytest.mark.usefixtures("thin")
def test_layouts_are_predicted_with_the_same_weights():
    rows = advise_shapes(workload(BABY, 8), cluster([0, 1, 2, 3]), "mpich")
    assert "thin" not in {row["strategy"] for row in rows}
    whole = next(row for row in rows if row["copies"] == 4)
    assert whole["strategy"] == "hierarchical-sharded"
