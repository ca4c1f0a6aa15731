"""advise.py --from-run with --global-batch, and what is predicted of a run whose ranks share models: runs with known
times beside numbers made by hand."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from gpt2.config import PRESETS, GPT2Config
from gpt2.model_shards import model_shards
from gpt2.parameters import Layout
from gpt2.pipeline import SCHEDULES
from scripts.prediction.model_parallel_run import replica_training
from scripts.reports.verdict import as_text, diagnose
from strategies import STRATEGIES
from tests.support.make_run import write_run
from tests.support.pipeline_runs import make_shared, places_of
from tests.unit.test_advise import answer, run, steps_of
from tests.unit.test_cost_of_cuts import by_events
from traces import RunError, read_run
from traces.read.analysis import measure

pytestmark = pytest.mark.any_mpi
RATE, LATENCY_S = 50e6, 1e-4
BABY = PRESETS["baby"]
DEEP = GPT2Config(n_layer=12, n_head=4, n_embd=128, context=64, vocab_size=256)
SHAPE = {"model": "baby", "tokenizer": "bytes", "n_layer": 12, "batch_size": 4, "seq_len": 64}
HOP_S = 4 * 4 * 64 * 128 / RATE + LATENCY_S


def links_of(nodes):
    rates = dict.fromkeys(("in", "out", "both"), RATE)
    return [{"node": node, "host": f"cn{node:02d}", "latency_s": LATENCY_S, **rates} for node in sorted(set(nodes))]


def rewrite(folder, settings=(), **facts):
    """The run's config.json with other facts and settings."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["settings"] |= dict(settings)
    path.write_text(json.dumps(config | facts))
    return folder


def cut_run(folder, mesh=(1, 1, 4), nodes=(0, 1, 2, 3), **changes):
    """A run of DEEP as train.py writes it, its ranks sharing models."""
    make_shared(folder, **{"mesh": mesh, "nodes": nodes, "hop_ms": 1e3 * HOP_S, "noise": 0.0} | changes)
    places = [
        {"rank": rank} | {name: place[name] for name in ("copy", "part", "stage")}
        for rank, place in enumerate(places_of(mesh))
    ]
    links = links_of(nodes) if len(set(nodes)) > 1 else []
    flags = SHAPE | {"tensor_parallel": mesh[1], "pipeline_parallel": mesh[2]}
    return rewrite(folder, flags, parameters=Layout(DEEP).count, mesh=places, links=links)


def copies_run(folder, exchange_ms):
    """Four ranks of the baby model on four nodes compute 40 ms, exchange around a ring, and update in 8."""
    write_run(
        folder, steps_of([40, 40, 40, 40], exchange_ms, 8), [0, 1, 2, 3], "ring", links=links_of(range(4)),
        parameters=Layout(BABY).count, model="baby", tokenizer="bytes", batch_size=1, seq_len=64, grad_accum=2,
    )  # fmt: skip
    return folder


RING_MS = 1.5e3 * 4 * Layout(BABY).count / RATE


@pytest.mark.parametrize("batch", [8, 16])
def test_a_run_of_copies_says_what_stages_would_take(tmp_path, batch):
    """A micro-step is 20 ms of a rank's. Each of four stages has a layer, and the last one the head, too."""
    folder = copies_run(tmp_path / "run", RING_MS)
    report = answer("--from-run", str(folder), "--global-batch", str(batch))
    rows = {(row["copies"], row["parts"], row["stages"]): row for row in report["shapes"]}
    assert set(rows) == {(4, 1, 1), (2, 1, 2), (1, 1, 4)}
    layer, head = 72 * 128**2 + 6 * 128 * 64, 6 * 128 * 256
    tau_s = 0.020 * np.array([layer, layer, layer, layer + head]) / (4 * layer + head)
    plans = [SCHEDULES["1f1b"](stage, 4, batch) for stage in range(4)]
    pipeline_s = max(by_events(plans, tau_s / 3, 2 * tau_s / 3, 4 * 64 * 128 / RATE + LATENCY_S))
    share = (256 * 128 + 64 * 128 + 12 * 128**2 + 13 * 128) / Layout(BABY).count
    assert rows[1, 1, 4]["step_s"] == pytest.approx(pipeline_s + 0.008 * share, rel=0.02)
    assert report["notes"][0].startswith("measured: ring ")
    assert "off by +0." in report["notes"][0] or "off by -0." in report["notes"][0]
    assert rows[4, 1, 1]["step_s"] < 0.040 * batch / 8 + (RING_MS + 8) / 1e3


def test_other_nodes_and_links_and_memory(tmp_path):
    """Eight ranks share the same batch: half the computing each. A rank of one node waits for nobody."""
    folder = copies_run(tmp_path / "run", RING_MS)
    flags = ["--from-run", str(folder), "--global-batch", "8", "--nodes", "2", "--ranks-per-node", "4"]
    report = answer(*flags, "--link", "100gbit", "--memory", "1KB")
    row = next(row for row in report["shapes"] if (row["copies"], row["stages"]) == (8, 1))
    assert row["step_s"] == pytest.approx(0.020 + row["shares"]["exchange"] * row["step_s"] + 0.008 / 8, rel=0.15)
    assert not any(row["fits"] for row in report["shapes"])
    assert "None fits" in report["advice"]


def test_a_run_on_one_node_is_not_held_against_the_model(tmp_path):
    folder = rewrite(copies_run(tmp_path / "run", RING_MS), links=[])
    result = run("--from-run", str(folder), "--global-batch", "8", "--link", "1gbit")
    assert result.returncode == 0, result.stderr
    assert "not predicted: config.json lacks its parameters, or the links of its nodes" in result.stdout


def test_a_run_that_does_not_say_its_shape_is_one_line(tmp_path):
    folder = rewrite(copies_run(tmp_path / "run", RING_MS), parameters=1000)
    result = run("--from-run", str(folder), "--global-batch", "8")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "lacks the shape of its model or batches: describe them with --model" in result.stderr
    result = run("--from-run", str(folder), "--global-batch", "8", "--seq-len", "8")
    assert "--from-run knows --seq-len from the run" in result.stderr


# --- runs whose ranks share models ---


def model_of(folder):
    return diagnose(read_run(folder))["evidence"]["model"]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("tau_ms", [(30, 30, 30, 30), (20, 50, 30, 30)])
def test_the_own_step_of_a_pipeline(tmp_path, schedule, tau_ms):
    folder = cut_run(tmp_path / "run", tau_ms=tau_ms, schedule=schedule, update_ms=20.0)
    rewrite(folder, {"pipeline_schedule": schedule})
    model = model_of(folder)
    assert model["predicted_step_s"] == pytest.approx(model["measured_step_s"], rel=0.01)
    closed_s = (7 * max(tau_ms) + sum(tau_ms) + 20) / 1e3 + 6 * HOP_S
    if schedule == "gpipe":
        assert model["predicted_step_s"] == pytest.approx(closed_s, rel=0.02)


def test_the_hops_are_the_links_(tmp_path, monkeypatch):
    """On links that carry a quarter, six hops more than three times as long, where ports are not in the way."""
    monkeypatch.setattr("scripts.prediction.cut_step.MOST_REPLAYED", -1)
    folder = cut_run(tmp_path / "run", schedule="gpipe")
    rewrite(folder, {"pipeline_schedule": "gpipe"})
    usual = model_of(folder)["predicted_step_s"]
    slow = [link | dict.fromkeys(("in", "out", "both"), RATE / 4) for link in links_of(range(4))]
    slower = model_of(rewrite(folder, links=slow))["predicted_step_s"]
    assert slower - usual == pytest.approx(6 * 3 * 4 * 4 * 64 * 128 / RATE, rel=0.01)


def test_parts_and_their_sums_are_what_a_stage_takes(tmp_path):
    shared = {"mesh": (1, 2, 2), "tau_ms": (30, 30), "layers": "6,6", "tensor_ms": 5.0, "nodes": (0, 0, 1, 1)}
    model = model_of(cut_run(tmp_path / "run", **shared))
    assert model["predicted_step_s"] == pytest.approx(model["measured_step_s"], rel=0.03)
    assert model["predicted_step_s"] > (9 * 40 + 2) / 1e3


def test_what_copies_exchange_comes_on_top(tmp_path):
    """Two copies of two stages, each on two nodes: the run exchanged nothing, and the model says what it would take."""
    folder = cut_run(tmp_path / "run", mesh=(2, 1, 2), tau_ms=(30, 30), layers="6,6")
    rewrite(folder, {"strategy": "ring"})
    for trace in (folder / "traces").glob("*.trace"):
        trace.write_bytes(trace.read_bytes().replace(b'"reduce-scatter"', b'"ring"'))
    first = Layout(DEEP, 1, model_shards((6, 6), 1)[0]).count
    model = model_of(folder)
    assert model["predicted_step_s"] - model["measured_step_s"] == pytest.approx(4 * first / RATE, rel=0.05)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda folder: (folder / "traces" / "rank-00002.trace").unlink(), "3 of 4 ranks left traces"),
        (lambda folder: rewrite(folder, links=[]), "the links of its nodes"),
        (lambda folder: rewrite(folder, parameters=1000), "lacks the shape of its model"),
        (
            lambda folder: rewrite(folder, {"batch_size": None}),
            "lacks the shape of its model or batches",
        ),
        (
            lambda folder: rewrite(folder, {"pipeline_layers": "6,6"}),
            "config.json says layers 6,6, the traces 4 stages",
        ),
    ],
)
def test_what_is_not_known_is_not_predicted(tmp_path, harm, said):
    folder = cut_run(tmp_path / "run")
    harm(folder)
    found = diagnose(read_run(folder, allow_missing=True))
    assert found["evidence"]["model"]["predicted_step_s"] is None
    assert said in found["evidence"]["model"]["own_unknown"]
    json.dumps(found, allow_nan=False)
    assert f"this run's step is not predicted: {found['evidence']['model']['own_unknown']}" in as_text(found)


@pytest.mark.parametrize("damage", [{"batch_size": "x"}, {"tensor_parallel": 0}, {"pipeline_schedule": "interleaved"}])
def test_settings_that_cannot_be_are_damage(tmp_path, damage):
    with pytest.raises(RunError, match=next(iter(damage))):
        read_run(rewrite(cut_run(tmp_path / "run"), damage))


def test_copies_on_one_node_are_not_predicted(tmp_path):
    folder = cut_run(tmp_path / "run", mesh=(2, 1, 2), tau_ms=(30, 30), layers="6,6", nodes=(0, 0, 0, 0))
    assert "all its ranks are on one node" in model_of(folder)["own_unknown"]
    alone = model_of(cut_run(tmp_path / "alone", nodes=(0, 0, 0, 0), hop_ms=0.01))
    assert alone["predicted_step_s"] == pytest.approx(alone["measured_step_s"], rel=0.01)


def test_reports_say_it_in_words(tmp_path):
    folder = cut_run(tmp_path / "run")
    found = diagnose(read_run(folder))
    said = "this run's step, predicted from its stages' compute times: "
    assert f"not predicted: several ranks share a model; advise.py --from-run {folder} --global-batch" in as_text(found)
    assert said in as_text(found)
    assert found["advice"] == []


def test_the_table_of_strategies_refuses_in_one_line_that_says_what_to_use(tmp_path):
    folder = cut_run(tmp_path / "run")
    result = run("--from-run", str(folder))
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "4 ranks share a model, but this table needs a whole model per rank: add --global-batch 32" in result.stderr


def test_a_cut_run_says_what_other_cuts_would_take(tmp_path):
    """Its own shape as it was: four equal stages of 30 ms, and eight micro-steps; copies compute 240 ms."""
    folder = cut_run(tmp_path / "run", hop_ms=1e3 * HOP_S)
    report = answer("--from-run", str(folder), "--global-batch", "32")
    rows = {(row["copies"], row["parts"], row["stages"]): row for row in report["shapes"]}
    ends = by_events([SCHEDULES["1f1b"](stage, 4, 8) for stage in range(4)], [0.01] * 4, [0.02] * 4, HOP_S)
    measured_s = max(ends) + 0.002
    assert rows[1, 1, 4]["step_s"] == pytest.approx(measured_s, rel=0.05)
    assert rows[4, 1, 1]["step_s"] * (1 - rows[4, 1, 1]["shares"]["exchange"]) == pytest.approx(0.24, rel=0.05)
    assert report["notes"][0].startswith("measured: reduce-scatter ")
    assert "predicted" in report["notes"][0]


def test_what_a_rank_with_a_whole_model_would_compute_and_update(tmp_path):
    """Of unequal stages the mean of all ranks; of the update what its share of the model is multiplied up to."""
    run = read_run(cut_run(tmp_path / "run", tau_ms=(20, 50, 30, 20)))
    training = replica_training(run, measure(run), SimpleNamespace(update_s=0.006), STRATEGIES["allreduce"])
    assert training.compute_s == pytest.approx(8 * 0.030, rel=0.01)
    largest = Layout(DEEP, 1, model_shards((3, 3, 3, 3), 1)[0]).count
    assert training.update_s == pytest.approx(0.006 * Layout(DEEP).count / largest)
