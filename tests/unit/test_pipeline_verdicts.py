"""Runs of models that several ranks share: what their stages wait for, by hand and as found, and the verdicts on it."""

import json

import numpy as np
import pytest

from scripts.prediction.of_run import own_schedule
from scripts.reports.verdict import diagnose
from tests.support.pipeline_runs import make_shared
from traces import RunError, read_run
from traces.plots import timeline
from traces.read.analysis import measure
from traces.read.efficiency import ideal_runtimes
from traces.read.pipeline import BACKWARD, FORWARD, Pipeline, better_layers, passes_of, pipeline_of
from traces.read.waits import find_receives, find_wait_states
from traces.verdict.summary import measure_runs

EVEN = (30.0, 30.0, 30.0, 30.0)


def said(folder, **changes):
    found = diagnose(make_shared(folder, **changes))
    return found["bottleneck"]["kind"], found["bottleneck"]["rank"], found["verdict"]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_the_bubble_is_what_the_formula_says(tmp_path, schedule):
    """4 stages, 8 micro-steps: 3/11 of the step is waiting, all of it structure."""
    run = make_shared(tmp_path, schedule=schedule, noise=0.0, hop_ms=0.0, update_ms=0.0)
    times = measure(run)
    found = pipeline_of(run, times)
    assert found.tau_s == pytest.approx(np.full(4, 0.030), rel=1e-6)
    assert found.ideal_s == pytest.approx((8 + 3) * 0.030, rel=1e-6)
    assert found.structure_s == pytest.approx(3 * 0.030, rel=1e-6)
    assert found.imbalance_s == pytest.approx(0.0, abs=1e-9)
    idle = 1 - 8 * 0.030 / float(np.median(times.step_seconds))
    assert idle == pytest.approx(3 / 11, rel=0.02)
    # A stage waits in receives, and at the end of the step until the first stage is through.
    ends = float(np.median(times.phase("wait").mean(axis=1)))
    assert found.wait_s + ends == pytest.approx(3 * 0.030, rel=0.02)
    assert found.late_s == pytest.approx(found.wait_s, rel=0.02)


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
    received = find_receives(run)
    places = run.places_in("copy", "part")
    assert len(received.step) == 4 * 8 * 8  # steps, ranks, one receive of each micro-step
    assert all(places[one] == places[other] for one, other in zip(received.place, received.sender, strict=True))
    states = find_wait_states(run)
    assert states.seconds.min() > 0


def test_groups_do_not_wait_for_one_another(tmp_path):
    """Copy 0 computes twice as long: in its own sums nobody of copy 1 waits for it."""
    slow = {0: 2.0, 1: 2.0, 4: 2.0, 5: 2.0}
    run = make_shared(tmp_path, mesh=(2, 2, 2), tau_ms=(30.0, 30.0), layers="2,2", tensor_ms=1.0, steps=6, slow=slow)
    times = measure(run)
    own = np.median(times.waiting_in("tensor"), axis=0)
    assert own.max() < 0.01, "parts of a copy are as fast as each other"


PARTS = {"mesh": (1, 2, 1), "tau_ms": (30,), "layers": None}
CASES = {
    "too few micro-steps": ({"micro_steps": 2}, "pipeline-bubble", None),
    "gpipe's bubble": ({"micro_steps": 4, "schedule": "gpipe"}, "pipeline-bubble", None),
    "enough micro-steps": ({"micro_steps": 32}, "compute-bound", None),
    "a long last stage": ({"tau_ms": (30, 30, 30, 50), "micro_steps": 16}, "stage-imbalance", None),
    "a long first stage": ({"tau_ms": (60, 30, 30, 30), "micro_steps": 16}, "stage-imbalance", None),
    "the best cut there is": (
        {"tau_ms": (28, 28, 28, 36), "layers": "4,4,4,0", "micro_steps": 32}, "compute-bound", None
    ),
    "sums of small parts": (PARTS | {"tensor_ms": 12.0}, "tensor-exchange", None),
    "sums across nodes": (PARTS | {"tensor_ms": 12.0, "nodes": (0, 1)}, "tensor-exchange", None),
    "sums that are cheap": (PARTS | {"tensor_ms": 1.0}, "compute-bound", None),
    "a slow part": (
        {"mesh": (1, 2, 2), "tau_ms": (30, 30), "layers": "2,2", "tensor_ms": 0.5, "slow": {2: 1.6}, "micro_steps": 16},
        "straggler", 2,
    ),
    "a slow host of a middle stage": ({"slow": {1: 1.8}, "micro_steps": 16}, "straggler", 1),
    "a slow copy of a stage": (
        {"mesh": (3, 1, 2), "tau_ms": (30, 30), "layers": "2,2", "slow": {4: 1.6}, "micro_steps": 16}, "straggler", 4
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_verdict_names_what_holds_the_step_up(case, tmp_path):
    changes, kind, rank = CASES[case]
    found = said(tmp_path, **changes)
    assert found[:2] == (kind, rank), found


def test_the_verdict_says_what_to_do(tmp_path):
    few = said(tmp_path / "few", micro_steps=2)[2]
    assert "with 2 micro-steps the bubble of 4 equal stages is 60%, with 4 it would be 43%" in few
    long = said(tmp_path / "long", tau_ms=(30, 30, 30, 75), layers="4,4,4,4", micro_steps=16)[2]
    assert "use --pipeline-layers 5,5,6,0" in long  # 7.5 ms a layer; the head is 45 ms
    across = said(tmp_path / "across", **PARTS, tensor_ms=12.0, nodes=(0, 1))[2]
    assert "parts lie on several nodes" in across


@pytest.mark.parametrize("seed", range(4))
def test_better_layers_against_every_cut(seed):
    """By trying all cuts of 12 layers into 4 stages."""
    random = np.random.default_rng(seed)
    layer, head = random.uniform(1, 5), random.uniform(0, 20)
    found = better_layers(Pipeline(8, layer * np.full(4, 3.0) + [0, 0, 0, head], 0, 0, (3, 3, 3, 3)), 0)
    cuts = [(a, b, c, 12 - a - b - c) for a in range(1, 11) for b in range(1, 11) for c in range(1, 11)]
    cost = {cut: max(*(layer * n for n in cut[:3]), layer * cut[3] + head) for cut in cuts if cut[3] >= 0}
    best = min(cost.values())
    assert cost[found or (3, 3, 3, 3)] == pytest.approx(best)


@pytest.mark.parametrize(
    "damage",
    [
        {"mesh": [2, 2, 3]},
        {"mesh": [1, 1, 4, 1]},
        {"mesh": "x"},
        {"stage": 4},
        {"part": -1},
        {"copy": None},
        {"mesh": [4]},
    ],
)
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
                assert passes.micro_step[own & (passes.phase == phase)].tolist() == list(range(8)), (stage, step)
    (one,) = measure_runs([run], own_schedule)
    figure = timeline.draw(one)
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert {str(number) for number in range(1, 9)} <= set(texts)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [
        "stage 0 part 0 (rank 0)", "stage 0 part 1 (rank 1)", "stage 1 part 0 (rank 2)", "stage 1 part 1 (rank 3)",
    ]  # fmt: skip


def test_lanes_are_ordered_by_copy_stage_and_part(tmp_path):
    run = make_shared(tmp_path, mesh=(2, 1, 2), tau_ms=(30, 30), layers="2,2", steps=3)
    assert run.mesh.order.tolist() == [0, 2, 1, 3]
    assert run.mesh.name(2) == "copy 0 stage 1"
