"""Runs of models that several ranks share: what their stages wait for, by hand and as found, and the verdicts on it."""

import json

import numpy as np
import pytest

from scripts.prediction.run_prediction import own_schedule
from scripts.reports.verdict import as_text, diagnose
from tests.support.pipeline_runs import make_shared
from traces import RunError, read_run
from traces.plots import timeline
from traces.read.analysis import measure
from traces.read.efficiency import ideal_runtimes
from traces.read.pipeline_times import (
    BACKWARD,
    BETTER,
    FORWARD,
    PipelineTimes,
    better_layers,
    passes_of,
    stage_work,
)
from traces.read.waits import STATES, find_wait_states, find_waits
from traces.record.phases import INDEX
from traces.verdict.summary import measure_runs


def said(folder, **changes):
    found = diagnose(make_shared(folder, **changes))
    return tuple(found["bottleneck"][name] for name in ("kind", "node", "rank")), found["verdict"]


def test_an_ideal_network_leaves_the_pipeline_as_it_is(tmp_path):
    """Without hops a replay gives the step that was; with long ones the step without them."""
    ideal = []
    for hop_ms in (0.0, 10.0):
        run = make_shared(tmp_path / str(hop_ms), noise=0.0, hop_ms=hop_ms, update_ms=0.0)
        times = measure(run)
        ideal.append(float(np.median(ideal_runtimes(run, times))))
    assert ideal[0] == pytest.approx(11 * 0.030, rel=0.02)
    assert ideal[1] == pytest.approx(ideal[0], rel=0.02)


def test_a_receive_waits_for_its_own_send(tmp_path):
    run = make_shared(tmp_path, mesh=(2, 2, 2), tau_ms=(30.0, 30.0), layers="2,2", tensor_ms=1.0, steps=4)
    places = run.places_in("copy", "part")
    received = 0
    for trace, waits_ns in zip(run.ranks, find_waits(run), strict=True):
        is_receive = trace.records["phase"] == INDEX["recv"]
        length = (trace.records["end"] - trace.records["start"])[is_receive]
        # From its beginning until the message leaves; on its way it is for 0.2 ms, and 10 us later the rank goes on.
        assert waits_ns[is_receive] == pytest.approx(np.maximum(0, length - 210_000), abs=10)
        received += is_receive.sum()
    assert received == 4 * 8 * 8  # steps, ranks, one receive of each micro-step
    states = find_wait_states(run)
    assert states.seconds.min() > 0
    is_message = states.state == STATES.index("late_sender")
    pairs = set(zip(states.place[is_message].tolist(), states.cause[is_message].tolist(), strict=True))
    assert len(pairs) == 8
    assert all(places[one] == places[other] for one, other in pairs)


def also(folder, **changes):
    return [one["kind"] for one in diagnose(make_shared(folder, **changes))["evidence"]["also"]]


PARTS = {"mesh": (1, 2, 1), "tau_ms": (30,), "layers": None}
NOBODY = (None, None)
LONG = {"micro_steps": 16, "exchange_ms": 2.0}
ONE_EACH, PAIRS = (0, 1, 2, 3), (0, 0, 1, 1, 2, 2, 3, 3)
CASES = {
    "too few micro-steps": ({"micro_steps": 2}, ("pipeline-bubble", *NOBODY)),
    "gpipe's bubble": ({"micro_steps": 4, "schedule": "gpipe"}, ("pipeline-bubble", *NOBODY)),
    # A fifth of the step, a third of which lies behind the last backwards.
    "a healthy pipeline with 12": ({"micro_steps": 12, "exchange_ms": 2.0}, ("pipeline-bubble", *NOBODY)),
    "enough micro-steps": ({"micro_steps": 32}, ("compute-bound", *NOBODY)),
    "enough micro-steps of two copies": (
        {"mesh": (2, 1, 4), "micro_steps": 32, "exchange_ms": 2.0}, ("compute-bound", *NOBODY),
    ),
    "a long last stage": ({"tau_ms": (30, 30, 30, 50), "micro_steps": 16}, ("stage-imbalance", *NOBODY)),
    "a long first stage": (
        {"tau_ms": (60, 30, 30, 30), "layers": "6,3,3,3", "micro_steps": 16}, ("stage-imbalance", *NOBODY),
    ),
    "a long stage of two": (
        {"mesh": (1, 1, 2), "tau_ms": (45, 15), "layers": "6,2"} | LONG, ("stage-imbalance", *NOBODY),
    ),
    "a long stage of two copies": (
        {"mesh": (2, 1, 4), "tau_ms": (60, 20, 20, 20), "layers": "6,2,2,2"} | LONG, ("stage-imbalance", *NOBODY),
    ),
    "an embedding that takes long": ({"embedding_ms": 30.0} | LONG, ("stage-imbalance", *NOBODY)),
    "a slow last stage, or a long head": ({"slow": {3: 1.8}, "nodes": ONE_EACH} | LONG, ("stage-imbalance", *NOBODY)),
    "the best cut there is": (
        {"tau_ms": (28, 28, 28, 36), "layers": "4,4,4,0", "micro_steps": 32}, ("compute-bound", *NOBODY)
    ),
    "an embedding longer than any stage": (
        {"tau_ms": (10, 30, 30, 30), "layers": "1,3,3,3", "embedding_ms": 40.0, "micro_steps": 32},
        ("compute-bound", *NOBODY),
    ),
    "sums of small parts": (PARTS | {"tensor_ms": 12.0}, ("tensor-exchange", *NOBODY)),
    "sums across nodes": (PARTS | {"tensor_ms": 12.0, "nodes": (0, 1)}, ("tensor-exchange", *NOBODY)),
    "sums that are cheap": (PARTS | {"tensor_ms": 1.0}, ("compute-bound", *NOBODY)),
    "a slow part": (
        {"mesh": (1, 2, 2), "tau_ms": (30, 30), "layers": "2,2", "tensor_ms": 0.5, "slow": {2: 1.6}, "micro_steps": 16},
        ("straggler", 0, 2),
    ),
    "a slow host of a middle stage": ({"slow": {1: 1.8}, "nodes": ONE_EACH} | LONG, ("straggler", 1, 1)),
    "a slow host of the first stage": ({"slow": {0: 1.8}, "nodes": ONE_EACH} | LONG, ("straggler", 0, 0)),
    # Its only forward sends the embedding, too.
    "a slow first stage of one micro-step": (
        {"slow": {0: 1.8}, "nodes": ONE_EACH, "micro_steps": 1}, ("pipeline-bubble", *NOBODY),
    ),
    "a slow host of two copies' middle stage": (
        {"mesh": (2, 1, 4), "slow": {2: 1.6, 3: 1.6}, "nodes": PAIRS} | LONG, ("straggler", 1, None),
    ),
    "a slow host of two parts' first stage": (
        {"mesh": (1, 2, 4), "slow": {0: 1.6, 1: 1.6}, "nodes": PAIRS, "tensor_ms": 0.5} | LONG, ("straggler", 0, None),
    ),
    "two stages on a slow host": (
        {"mesh": (1, 1, 6), "tau_ms": (30,) * 6, "layers": "3,3,3,3,3,3", "slow": {2: 1.8, 3: 1.8},
         "nodes": (0, 0, 1, 1, 2, 2), "micro_steps": 32}, ("straggler", 1, None),
    ),
    # The last stage is not compared: of its host the other stage tells.
    "a slow host of the last two stages": (
        {"mesh": (2, 1, 4), "slow": dict.fromkeys(range(4, 8), 1.6), "nodes": (0, 0, 0, 0, 1, 1, 1, 1)} | LONG,
        ("straggler", 1, None),
    ),
    "a stage on several slow hosts": (
        {"mesh": (2, 1, 4), "slow": {2: 1.6, 3: 1.6}, "nodes": range(8)} | LONG, ("stage-imbalance", *NOBODY),
    ),
    "a slow copy of a stage": (
        {"mesh": (3, 1, 2), "tau_ms": (30, 30), "layers": "2,2", "slow": {4: 1.6}, "micro_steps": 16},
        ("straggler", 0, 4),
    ),
    "a slow copy": (
        {"mesh": (2, 1, 2), "tau_ms": (30, 20), "layers": "2,2", "slow": {1: 1.6, 3: 1.6}, "nodes": ONE_EACH} | LONG,
        ("imbalance", *NOBODY),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_verdict_names_what_holds_the_step_up(case, tmp_path):
    changes, expected = CASES[case]
    found, sentence = said(tmp_path, **changes)
    assert found == expected, sentence


@pytest.mark.parametrize("seed", range(1, 5))
def test_a_healthy_pipeline_accuses_nobody(seed, tmp_path):
    run = make_shared(tmp_path, mesh=(2, 1, 4), nodes=PAIRS, micro_steps=32, exchange_ms=2.0, noise=0.08, seed=seed)
    found = diagnose(run)
    assert (found["bottleneck"]["kind"], found["evidence"]["also"]) == ("compute-bound", [])


@pytest.mark.parametrize(
    "case",
    ["a long stage of two copies", "a slow host of a middle stage", "a slow host of two copies' middle stage"],
)
def test_one_cause_has_one_finding(case, tmp_path):
    """A long stage is no uneven work of its ranks; a slow host is no long stage."""
    assert also(tmp_path, **CASES[case][0]) == []


def test_waiting_for_a_late_part_is_no_slow_sum(tmp_path):
    """A third of the step is such waiting, 2% are the sums themselves."""
    assert "tensor-exchange" not in also(tmp_path, **PARTS | {"tensor_ms": 0.5, "slow": {1: 3.0}})


def test_a_slow_rank_comes_before_the_bubble_beside_it(tmp_path):
    found = diagnose(make_shared(tmp_path, mesh=(2, 1, 4), slow={3: 1.5}, nodes=PAIRS))
    assert (found["bottleneck"]["kind"], found["bottleneck"]["rank"]) == ("straggler", 3)
    assert [one["kind"] for one in found["evidence"]["also"]] == ["pipeline-bubble"]


REMEDIES = {
    "few": ({"micro_steps": 2}, "the bubble of 4 equal stages is 60% with 2 microbatches, and would be 43% with 4"),
    # 7.5 ms a layer; the head is 45 ms.
    "a head": ({"tau_ms": (30, 30, 30, 75), "layers": "4,4,4,4", "micro_steps": 16}, "use --pipeline-layers 5,5,6,0"),
    # Parts of a head are on every rank of the last stage: it has a layer at least.
    "parts of a head": (
        {"mesh": (1, 2, 4), "tau_ms": (30, 30, 30, 75), "layers": "4,4,4,4", "micro_steps": 16},
        "use --pipeline-layers 5,5,5,1",
    ),
    "an embedding": ({"embedding_ms": 30.0, "noise": 0.0} | LONG, "use --pipeline-layers 1,3,4,4"),
    "of two": (CASES["a long stage of two"][0], "use --pipeline-layers 4,4"),
    "layers unknown": ({"tau_ms": (60, 30, 30, 30), "layers": None} | LONG, "fewer layers with --pipeline-layers"),
    "hosts": (CASES["a stage on several slow hosts"][0], "layers are faster, so look for what slows cn02, cn03"),
    "a host": (CASES["a slow host of two copies' middle stage"][0], "ranks 2 and 3 on cn01 compute 0.7"),
    "across": (PARTS | {"tensor_ms": 12.0, "nodes": (0, 1)}, "shards lie on several nodes"),
}  # fmt: skip


@pytest.mark.parametrize("case", REMEDIES)
def test_the_verdict_says_what_to_do(case, tmp_path):
    changes, says = REMEDIES[case]
    assert says in said(tmp_path, **changes)[1]


def test_the_bubble_stands_below_the_efficiencies(tmp_path):
    """4 stages, 8 micro-steps: 3 slots of 11 are empty."""
    run = make_shared(tmp_path, noise=0.0, hop_ms=0.0, update_ms=0.1)
    found = diagnose(run)
    lines = as_text(found).splitlines()
    (at,) = [number for number, line in enumerate(lines) if line.startswith("of which")]
    assert lines[at - 1].startswith("efficiency")
    assert lines[at] == (
        "of which    pipeline bubble 27% of the step: structure 27%, unequal stages 0%, transfer 0%; 8 microbatches of "
        "30 ms, 30 ms, 30 ms, 30 ms on the stages take 330 ms if messages take no time"
    )


@pytest.mark.parametrize("seed", range(4))
def test_better_layers_against_every_cut(seed):
    """By trying all cuts of 12 layers into 4 stages."""
    random = np.random.default_rng(seed)
    layer, head = random.uniform(1, 5), random.uniform(0, 20)
    first = random.uniform(0, 10)
    found = better_layers(PipelineTimes(8, layer * np.full(4, 3.0) + [first, 0, 0, head], 0, (3, 3, 3, 3)), 0)
    cuts = [(a, b, c, 12 - a - b - c) for a in range(1, 11) for b in range(1, 11) for c in range(1, 11)]
    cost = {
        cut: max(layer * cut[0] + first, layer * max(cut[1:3]), layer * cut[3] + head) for cut in cuts if cut[3] >= 0
    }
    best = min(cost.values())
    assert cost[found] == pytest.approx(best) if found else cost[3, 3, 3, 3] * BETTER <= best


@pytest.mark.parametrize(
    ("tau", "layers", "layer", "beside"),
    [
        ((20, 10, 30), (4, 4, 4), 2.5, (10, 0, 20)),
        ((10, 15, 10, 10, 10), (4, 4, 4, 4, 0), 2.5, (0, 0, 0, 0, 10)),
        ((20, 30), (4, 2), 5, (0, 20)),
        ((20, 5), (4, 2), 5, (0, 0)),
    ],
)
def test_what_stages_take_beside_their_layers(tau, layers, layer, beside):
    """A layer takes what it does on the stages between first and last; a slow one of several does not make it long."""
    found = stage_work(PipelineTimes(8, np.array(tau, float), 0, layers))
    assert found[0] == layer
    assert found[1].tolist() == [*beside]
    assert stage_work(PipelineTimes(8, np.array(tau, float), 0, ())) is None


def test_layers_that_are_about_as_good_are_not_worth_saying():
    """Of 21 layers one is 4.8% of the longest stage; two of 22 are 9%."""
    assert better_layers(PipelineTimes(8, np.array([21.0, 20, 20, 19]), 0, (21, 20, 20, 19)), 0) is None
    assert better_layers(PipelineTimes(8, np.array([22.0, 20, 20, 18]), 0, (22, 20, 20, 18)), 0) == (20, 20, 20, 20)


PLACES = ({"mesh": [2, 2, 3]}, {"mesh": [1, 1, 4, 1]}, {"mesh": "x"}, {"mesh": [4]})


@pytest.mark.parametrize("damage", [*PLACES, {"stage": 4}, {"part": -1}, {"copy": None}])
def test_a_place_that_cannot_be_is_damage(damage, tmp_path):
    run = make_shared(tmp_path, steps=3)
    path = tmp_path / "traces" / "rank-00002.trace"
    header, _, rest = path.read_bytes().partition(b"\n")
    header = json.loads(header)
    header["identity"] |= damage
    path.write_bytes(json.dumps(header).encode() + b"\n" + rest)
    with pytest.raises(RunError, match=r"rank-00002\.trace"):
        read_run(run.path)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_micro_steps_are_found_and_numbered_in_the_timeline(schedule, tmp_path):
    """Sums over parts cut each pass into pieces; it is one pass with one number all the same."""
    run = make_shared(
        tmp_path, mesh=(1, 2, 2), tau_ms=(30, 30), layers="2,2", tensor_ms=1.0, steps=4, schedule=schedule
    )
    for stage, trace in zip(run.mesh.stage, run.ranks, strict=True):
        passes = passes_of(trace.records)
        for step in range(1, 5):
            own = passes.step == step
            for phase in (FORWARD, BACKWARD):
                assert passes.microbatch[own & (passes.phase == phase)].tolist() == list(range(8)), (stage, step)
    (one,) = measure_runs([run], own_schedule)
    figure = timeline.draw(one)
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert {str(number) for number in range(1, 9)} <= set(texts)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [
        "stage 0 shard 0 (rank 0)", "stage 0 shard 1 (rank 1)", "stage 1 shard 0 (rank 2)", "stage 1 shard 1 (rank 3)",
    ]  # fmt: skip


def test_lanes_are_ordered_by_copy_stage_and_part(tmp_path):
    run = make_shared(tmp_path, mesh=(2, 1, 2), tau_ms=(30, 30), layers="2,2", steps=3)
    assert run.mesh.order.tolist() == [0, 2, 1, 3]
    assert run.mesh.name(2) == "replica 0 stage 1"
