"""POP efficiencies and the replay without transfer times, against runs computed by hand."""

import numpy as np
import pytest

from tests.support.make_run import three_ranks, write_run
from traces import read_run
from traces.read.analysis import measure
from traces.read.efficiency import efficiency, ideal_runtimes
from traces.record.phases import STEP
from traces.verdict.evidence import gather


def measured(folder, spans, nodes=None, **settings):
    run = read_run(write_run(folder, spans, nodes or [0] * len(spans), **settings))
    return run, measure(run)


def of(folder, spans, **settings) -> dict:
    run, times = measured(folder, spans, **settings)
    return efficiency(times, ideal_runtimes(run, times))


def rank_spans(*phases, step=1, start=0):
    """One rank's step from consecutive (phase, root, ms); "other" is time in no phase."""
    spans, now = [], start
    for phase, root, ms in phases:
        if phase != "other":
            spans.append((step, phase, root, now, now + ms))
        now += ms
    return [*spans, (step, STEP, -1, start, now)]


# Rank 1 comes to the exchange at 30 ms; the data take 20 ms more.
UNEVEN = [
    rank_spans(("forward", -1, 10), ("allreduce", -1, 40)),
    rank_spans(("forward", -1, 30), ("allreduce", -1, 20)),
]


@pytest.mark.parametrize(("replayed_s", "ideal_s"), [(0.06, 0.05), (0.02, 0.03), (0.04, 0.04)])
def test_clocks_that_are_a_little_off_make_no_efficiency_above_one(replayed_s, ideal_s, tmp_path):
    """A replayed step is no longer than the step, 50 ms, and no shorter than the longest computing in it, 30 ms."""
    _, times = measured(tmp_path, UNEVEN)
    one = efficiency(times, np.array([replayed_s]))
    assert (one["serialization"], one["transfer"]) == pytest.approx((0.03 / ideal_s, ideal_s / 0.05))
    assert max(one["load_balance"], one["serialization"], one["transfer"]) <= 1 + 1e-9
    assert min(one["lost"].values()) >= -1e-9
    assert sum(one["lost"].values()) + one["parallel"] == pytest.approx(1)


def test_uneven_compute_before_an_allreduce(tmp_path):
    one = of(tmp_path, UNEVEN)
    assert one["load_balance"] == pytest.approx(20 / 30)
    assert one["serialization"] == pytest.approx(1)
    assert one["transfer"] == pytest.approx(30 / 50)
    assert one["communication"] == pytest.approx(30 / 50)
    assert one["parallel"] == pytest.approx(20 / 50)
    assert one["lost"] == pytest.approx({"load_balance": 10 / 50, "serialization": 0, "transfer": 20 / 50})


def test_a_server_serializes(tmp_path):
    # The reduce ends ideally when rank 2 comes (30), the update 10 later; all have the bcast at 40, and 4 in no phase.
    one = of(tmp_path, three_ranks(4))
    assert one["load_balance"] == pytest.approx((64 / 3) / 30)
    assert one["serialization"] == pytest.approx(30 / 44)
    assert one["parallel"] == pytest.approx((64 / 3) / 84)
    assert one["parallel"] + sum(one["lost"].values()) == pytest.approx(1)


def test_work_one_after_another(tmp_path):
    """Rank 1 begins with what rank 0 sends, and rank 0 ends with what rank 1 sends: nobody is unbalanced."""
    first = rank_spans(("forward", -1, 20), ("bcast", 0, 5), ("bcast", 1, 30), ("wait", -1, 5))
    second = rank_spans(("bcast", 0, 30), ("forward", -1, 20), ("bcast", 1, 5), ("wait", -1, 5))
    one = of(tmp_path, [first, second])
    assert one["load_balance"] == pytest.approx(1)
    assert one["serialization"] == pytest.approx(20 / 40)
    assert one["transfer"] == pytest.approx(40 / 60)


def test_ranks_that_begin_a_step_one_after_another_make_it_no_longer(tmp_path):
    """Nothing holds them together between steps: rank 3 leaves the exchange 75 ms after rank 0, who computes meanwhile,
    and from rank 0's start to rank 3's end it is 175 ms. Yet there is a step each 100 ms, of which 20 are computing."""
    spans = [[] for _ in range(4)]
    for rank, own in enumerate(spans):
        for step in range(1, 13):
            phases = ("compute", -1, 20), ("allreduce", -1, 80)
            own += rank_spans(*phases, step=step, start=100 * step + 25 * rank)
    run, times = measured(tmp_path, spans, [0, 1, 2, 3])
    evidence = gather(run, times)
    assert (evidence.step_s, evidence.transfer_s) == pytest.approx((0.100, 0.080))
    assert evidence.efficiency["parallel"] == pytest.approx(0.2)


def test_ranks_that_meet_nowhere_run_as_long_as_the_slowest(tmp_path):
    spans = [rank_spans(("compute", -1, 10)), rank_spans(("compute", -1, 30))]
    one = of(tmp_path, spans)
    assert (one["serialization"], one["transfer"]) == pytest.approx((1.0, 1.0))
    assert one["parallel"] == pytest.approx(20 / 30)


TWICE = [("forward", -1, 10), ("reduce", 1, 4)] * 2 + [("allreduce", -1, 5)]
SHORT = ("forward", -1, 10), ("allreduce", -1, 5)
LONG = *SHORT, ("forward", -1, 7), ("allreduce", -1, 9)
REPLAYS = {
    # Reduces to 0 and to 2 inside the nodes, an allreduce of the two leaders, which the last of each node lets begin.
    # Leaders: 20 and 16, so 20; but what is in no phase counts as the rank's own: rank 1 ends at 48, rank 3 at 46.
    "nodes that reduce apart and then meet": (
        [
            rank_spans(("forward", -1, 10), ("reduce", 0, 12), ("allreduce", -1, 28)),
            rank_spans(("forward", -1, 20), ("reduce", 0, 2), ("other", -1, 28)),
            rank_spans(("forward", -1, 16), ("reduce", 2, 4), ("allreduce", -1, 30)),
            rank_spans(("forward", -1, 12), ("reduce", 2, 4), ("other", -1, 34)),
        ],
        [0.048],
    ),
    "who comes to a broadcast after its root waits for nobody": (
        [rank_spans(("data", -1, ms), ("forward", -1, 1), ("bcast", 0, 5)) for ms in (10, 30)], [0.031],
    ),
    "who sends to a reduce waits for no other sender": (
        [
            rank_spans(("forward", -1, 5), ("reduce", 0, 30)),
            rank_spans(("forward", -1, 10), ("reduce", 0, 5), ("forward", -1, 50)),
            rank_spans(("forward", -1, 30), ("reduce", 0, 5)),
        ],
        [0.060],
    ),
    # Ranks 1 and 2 reduce twice, and rank 0 waits for them in what follows: until 20 ms, though it came at 5.
    "equal calls of a step are told apart": (
        [rank_spans(("forward", -1, 5), ("allreduce", -1, 28), ("forward", -1, 50)), rank_spans(*TWICE),
         rank_spans(*TWICE)],
        [0.070],
    ),
    "steps with other calls are replayed by themselves": (
        [[*rank_spans(*SHORT), *rank_spans(*LONG, step=2, start=100), *rank_spans(*SHORT, step=3, start=200)]] * 2,
        [0.010, 0.017, 0.010],
    ),
    "a rank that made other calls holds no replay up": (
        [
            rank_spans(("forward", -1, 10), ("reduce", 0, 5), ("allreduce", -1, 5)),
            rank_spans(("forward", -1, 10), ("allreduce", -1, 5), ("reduce", 0, 5)),
        ],
        [0.010],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REPLAYS)
def test_a_replay_without_transfers(case, tmp_path):
    spans, expected = REPLAYS[case]
    assert ideal_runtimes(*measured(tmp_path, spans)) == pytest.approx(expected)
