"""The pipeline's bubble, taken apart, against numbers counted by hand; and who waits for whom in groups of ranks."""

import numpy as np
import pytest

from scripts.prediction.run_prediction import own_schedule
from tests.support.make_run import write_run
from tests.support.pipeline_runs import make_shared, places_of
from tests.unit.test_wait_states import states_ms
from traces import read_run
from traces.plots.lanes import lane_order, lanes_of
from traces.read.analysis import measure
from traces.read.efficiency import ideal_runtimes
from traces.read.pipeline_times import bubbles_ns, pipeline_of, shortest_forwards
from traces.record.phases import STEP
from traces.verdict.summary import measure_runs

# Two stages, three micro-steps: 3 + 3 + 2 slots of 10 ms of a forward, twice as many of a backward. A row is a stage, a
# letter 10 ms. f: a forward, bb: a backward, r: waiting, n: the norm.
ONE_F_ONE_B = ("ffrrbbfbbrbb", "rfbbfbbfbbnn")
GPIPE = ("fffrrrbbbbbb", "rfffbbbbbbnn")


def slots(*rows):
    """The spans of such a picture. Every pass but those at the ends of the pipeline begins with a message from the
    stage above (f) or below (b). All leave the norm at the end."""
    result = []
    for stage, row in enumerate(rows):
        found, at, waits_from = [], 0, 0
        while at < len(row) and row[at] != "n":
            if row[at] == "r":
                at += 1
                continue
            name, source, target, length = ("forward", -1, 1, 1) if row[at] == "f" else ("backward", 1, -1, 2)
            if 0 <= stage + source < len(rows):
                found.append((1, "recv", stage + source, 10 * waits_from, 10 * at))
            found.append((1, name, -1, 10 * at, 10 * (at + length)))
            at = waits_from = at + length
            if 0 <= stage + target < len(rows):
                found.append((1, "send", stage + target, 10 * at, 10 * at))
        result.append([*found, (1, "norm", -1, 10 * at, 10 * len(row)), (1, STEP, -1, 0, 10 * len(row))])
    return result


def read(folder, spans, mesh=(1, 1, 2)):
    places = places_of(mesh)
    return read_run(write_run(folder, spans, [0] * len(spans), "allreduce", log=[], places=places, grad_accum=3))


def waited_s(run):
    """What each rank waits for other stages."""
    return [bubbles.sum() * 1e-9 for bubbles in bubbles_ns(run, measure(run).waits)]


@pytest.mark.parametrize("rows", [ONE_F_ONE_B, GPIPE], ids=["1f1b", "gpipe"])
def test_a_step_by_hand(rows, tmp_path):
    """12 slots, of which each stage has 9 to do: a quarter is bubble, as (p - 1) / (m + p - 1) says."""
    run = read(tmp_path, slots(*rows))
    found = pipeline_of(run, measure(run))
    assert (found.microbatches, found.stages) == (3, 2)
    assert found.tau_s == pytest.approx([0.03, 0.03])
    assert found.ideal_s == pytest.approx(0.12)
    assert found.wait_s == pytest.approx(0.25 * 0.12)
    assert found.waits_s == pytest.approx({"structure": 0.03, "imbalance": 0, "transfer": 0})
    assert (found.bubble(3), found.bubble(6)) == (0.25, pytest.approx(1 / 7))
    assert waited_s(run) == pytest.approx([0.03, 0.03])


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "micro_steps"), [(2, 4), (4, 8), (4, 2), (3, 1)])
def test_equal_stages_have_the_bubble_that_everybody_quotes(stages, micro_steps, schedule, tmp_path):
    """(p - 1) / (m + p - 1) of the pipeline's time, the rest of the step being short."""
    run = make_shared(
        tmp_path, mesh=(1, 1, stages), tau_ms=(30.0,) * stages, layers=",".join("3" * stages), schedule=schedule,
        micro_steps=micro_steps, steps=4, exchange_ms=0.01, update_ms=0.01, hop_ms=0.0, noise=0.0,
    )  # fmt: skip
    times = measure(run)
    found = pipeline_of(run, times)
    share = (stages - 1) / (micro_steps + stages - 1)
    assert found.wait_s / np.median(times.step_seconds) == pytest.approx(share, rel=0.02)
    assert found.waits_s["imbalance"] + found.waits_s["transfer"] < 0.02 * found.wait_s


def test_unequal_stages_lose_to_the_longest(tmp_path):
    """Stages of 30, 30 and 60 ms, 8 micro-steps: 7 x 60 + 120 ms, of which the mean stage has 320 to do.

    Messages take 3 ms, so that more is measured.
    """
    changes = {"mesh": (1, 1, 3), "tau_ms": (30.0, 30.0, 60.0), "layers": "1,1,2", "update_ms": 0.01}
    run = make_shared(tmp_path, steps=4, exchange_ms=0.01, hop_ms=3.0, noise=0.0, **changes)
    found = pipeline_of(run, measure(run))
    assert found.layers == (1, 1, 2)
    assert found.ideal_s == pytest.approx(0.540)
    assert found.waits_s["structure"] == pytest.approx(2 * 0.040)
    assert found.waits_s["imbalance"] == pytest.approx(7 * 0.020)
    assert found.waits_s["transfer"] > 0.001
    assert sum(found.waits_s.values()) == pytest.approx(found.wait_s)


def test_what_is_exchanged_at_the_end_is_no_bubble(tmp_path):
    """The last stage reduces its gradients, alone, while the first one still computes: of 20 ms it waits 5."""
    rows = slots(*GPIPE)
    rows[1][-2:-1] = [(1, "allreduce", -1, 100, 115), (1, "norm", -1, 115, 120)]
    run = read(tmp_path, rows)
    assert waited_s(run) == pytest.approx([0.03, 0.01 + 0.005])
    assert pipeline_of(run, measure(run)).wait_s == pytest.approx((0.03 + 0.015) / 2)


def test_the_wait_at_the_end_counts_until_the_last_backward(tmp_path):
    """What ranks wait for behind it, an update say, is no pipeline's."""
    rows = slots(*GPIPE)
    rows[0] = [*rows[0][:-2], (1, "update", -1, 120, 150), (1, "wait", -1, 150, 151), (1, STEP, -1, 0, 151)]
    rows[1] = [*rows[1][:-2], (1, "wait", -1, 100, 151), (1, STEP, -1, 0, 151)]
    assert waited_s(read(tmp_path, rows)) == pytest.approx([0.03, 0.03])


def of_copies(rows, late_ms):
    """Two copies of such a picture, by rank: copies are neighbours. The second one is that late; at the end the copies
    of a stage exchange for 4 ms, the copies' norm ends with its copy, and all leave the step together."""
    spans, end = [], 10 * len(rows[0]) + late_ms + 4
    for row in slots(*rows):
        done = row[-2][3]  # when the norm begins
        for copy in range(2):
            late = copy * late_ms
            passes = [
                (1, name, 2 * root + copy if root >= 0 else -1, start + late, stop + late)
                for _, name, root, start, stop in row[:-2]
            ]
            met = done + late_ms + 4
            spans.append(
                [*passes, (1, "allreduce", -1, done + late, met), (1, "norm", -1, met, end), (1, STEP, -1, 0, end)]
            )
    return spans


def test_each_copy_has_a_pipeline_of_its_own(tmp_path):
    """The second copy is 5 ms late. Its stage 1 keeps that of the first one waiting in the exchange, which had nothing
    to do until 120 anyhow; that the first copy waits for it behind 120 ms is no bubble."""
    run = read(tmp_path, of_copies(GPIPE, 5), (2, 1, 2))
    # Stage 0 waits 30 in receives. Stage 1 of copy 0: 10 at the start, 5 for its copy, and from 109 to 120 in the norm;
    # of copy 1: 10 at the start, and from 109 to 125 in the norm.
    by_hand = [0.030, 0.030, 0.010 + 0.005 + 0.011, 0.010 + 0.016]
    assert waited_s(run) == pytest.approx(by_hand)
    (measured,) = measure_runs([run], own_schedule)
    drawn = lanes_of(measured, 0, 1)
    in_lanes = np.bincount(drawn.row, drawn.bubble) * 1e-3
    assert in_lanes[np.argsort(lane_order(run))] == pytest.approx(by_hand), "the picture shows what the verdict counts"
    assert drawn.parts >= {"bubble", "waiting"}


def test_sums_over_parts_belong_to_a_micro_step(tmp_path):
    """4 ms each way, beside 10 and 20 ms of computing."""
    run = make_shared(tmp_path, mesh=(1, 2, 2), tau_ms=(30.0, 30.0), layers="2,2", tensor_ms=4.0, steps=4, noise=0.0)
    assert pipeline_of(run, measure(run)).tau_s == pytest.approx([0.038, 0.038])


def test_who_waits_for_another_part_waits_for_no_stage(tmp_path):
    changes = {"mesh": (1, 2, 2), "tau_ms": (30.0, 30.0), "layers": "2,2", "slow": {0: 1.5}, "noise": 0.0}
    run = make_shared(tmp_path, tensor_ms=4.0, steps=4, **changes)
    assert measure(run).waiting_in("tensor")[:, 1].min() > 0.1
    slow, fast, *_ = waited_s(run)
    assert fast == pytest.approx(slow)


def test_who_waits_for_another_copy_before_its_last_backward_waits_for_no_stage(tmp_path):
    """Copy 0 gathers parameters in its first forward, and waits 4 ms there for the copy that comes later."""
    spans = of_copies(GPIPE, 0)
    for rank, begun in ((0, 5), (1, 9)):
        spans[rank][:1] = [(1, "forward", -1, 0, begun), (1, "allgather", -1, begun, 10)]
    run = read(tmp_path, spans, (2, 1, 2))
    assert measure(run).waiting_in("allgather")[0] == pytest.approx([0.004, 0, 0, 0])
    # The second stage's first 10 ms, and what it waits from 104, behind the copies' exchange, to 120.
    assert waited_s(run) == pytest.approx([0.030, 0.030, 0.010 + 0.016, 0.010 + 0.016])


def test_the_shortest_forward_of_each_step(tmp_path):
    """One of three takes 25 ms more: the embedding is sent meanwhile. Sums over parts are inside a forward."""
    rows = [[(*span[:3], span[3] + 25, span[4] + 25) for span in row[:-1]] for row in slots(*GPIPE)]
    rows[0][0] = (1, "forward", -1, 0, 35)
    cut = []
    for step, name, root, start, end in rows[1]:
        sums = [(step, "tensor", -1, start + 4, end - 2), (step, name, root, end - 2, end)] if name == "forward" else []
        cut += [(step, name, root, start, start + 4 if sums else end), *sums]
    rows[1] = cut
    run = read(tmp_path, [[*row, (1, STEP, -1, 0, 145)] for row in rows])
    assert shortest_forwards(run, measure(run)) == pytest.approx(np.full((1, 2), 0.010))


def test_a_run_without_stages_has_no_bubble(tmp_path):
    run = make_shared(tmp_path, mesh=(2, 2, 1), tau_ms=(30.0,), layers=None, tensor_ms=1.0, exchange_ms=1.0, steps=4)
    assert pipeline_of(run, measure(run)) is None
    assert waited_s(run) == [0, 0, 0, 0]


# --- who meets whom ---

# Ranks 0 to 7 of two copies of two parts of two stages are neighbours by part, then by copy, then by stage.
MEET = {
    "tensor": [[0, 1], [2, 3], [4, 5], [6, 7]],
    "lend": [[0, 1], [2, 3], [4, 5], [6, 7]],
    "norm": [[0, 1, 4, 5], [2, 3, 6, 7]],
    "allreduce": [[0, 2], [1, 3], [4, 6], [5, 7]],
    "reduce_scatter": [[0, 2], [1, 3], [4, 6], [5, 7]],
    "wait": [[0, 1, 2, 3, 4, 5, 6, 7]],
}


@pytest.mark.parametrize("phase", MEET)
def test_ranks_wait_for_those_alone_whom_they_meet(phase, tmp_path):
    """Rank r comes at 10 r ms, and the data of each group has moved 5 ms after its last one."""
    ends = {rank: 10 * group[-1] + 5 for group in MEET[phase] for rank in group}
    run = read(tmp_path, [[(1, phase, -1, 10 * rank, ends[rank])] for rank in range(8)], (2, 2, 2))
    expected = {(rank, "wait_at_nxn", group[-1]): 10.0 * (group[-1] - rank) for group in MEET[phase] for rank in group}
    assert states_ms(run) == pytest.approx({who: ms for who, ms in expected.items() if ms})


def test_groups_that_call_unequally_often_do_not_shift_each_other(tmp_path):
    """Stage 0 sums three times, stage 1 once: its call is its first, whatever the other stage's first was."""
    spans = [
        [(1, "tensor", -1, 0, 4), (1, "tensor", -1, 5, 9), (1, "tensor", -1, 10, 12)],
        [(1, "tensor", -1, 1, 4), (1, "tensor", -1, 8, 9), (1, "tensor", -1, 10, 12)],
        [(1, "tensor", -1, 100, 130)],
        [(1, "tensor", -1, 120, 130)],
    ]
    found = states_ms(read(tmp_path, spans, (1, 2, 2)))
    assert found == pytest.approx({(0, "wait_at_nxn", 1): 4.0, (2, "wait_at_nxn", 3): 20.0})


def test_senders_of_a_replay_wait_for_nobody(tmp_path):
    """Each sends before it receives: as broadcasts that all must come to, both would wait for ever."""
    spans = [
        [(1, "forward", -1, 0, 10), (1, "send", 1, 10, 11), (1, "recv", 1, 11, 32), (1, STEP, -1, 0, 40)],
        [(1, "forward", -1, 0, 30), (1, "send", 0, 30, 31), (1, "recv", 0, 31, 32), (1, STEP, -1, 0, 40)],
    ]
    run = read(tmp_path, spans)
    # The first one has its message at 30 and then 8 ms to go; the second one has lost 2 ms for both calls.
    assert ideal_runtimes(run, measure(run, 0)) == pytest.approx([0.038])
