"""Wait states and who caused them, sums that agree, traffic by phase, what hides: against runs computed by hand."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from tests.support.make_run import three_ranks, write_run
from traces import read_run
from traces.read.analysis import check_sums, measure
from traces.read.traffic import NodeTraffic, hidden_exchange_s, hidden_share, node_traffic
from traces.read.waits import STATES, find_wait_states, find_waits
from traces.record.phases import INDEX, NAMES, STEP
from traces.verdict.evidence import PredictedExchange, gather


def states_ms(run):
    """{(rank that waited, state, rank waited for): ms in all}."""
    states = find_wait_states(run)
    total = Counter()
    for place, state, cause, seconds in zip(states.place, states.state, states.cause, states.seconds, strict=True):
        total[int(place), STATES[state], int(cause)] += float(seconds * 1e3)
    return dict(total)


def allreduce(*times):
    return [[(1, "allreduce", -1, enter, leave)] for enter, leave in times]


CASES = {
    # The root comes at 10, the others at 14 and 30; it sends the parameters from 60 on, they wait since 45.
    "a reduce and a bcast": (
        three_ranks(),
        {(0, "early_reduce", 1): 4, (0, "late_sender", 2): 16, (1, "late_broadcast", 0): 15,
         (2, "late_broadcast", 0): 15},
    ),
    "without a root all wait for the last": (
        allreduce((10, 50), (25, 50), (40, 52)), {(0, "wait_at_nxn", 2): 30, (1, "wait_at_nxn", 2): 15},
    ),
    "in the sums at a step's end, too": (
        [[(1, "wait", -1, enter, 64)] for enter in (60, 63, 61)], {(0, "wait_at_nxn", 1): 3, (2, "wait_at_nxn", 1): 2},
    ),
    # Rank 0 has left before the last rank entered: clocks differ, or the library let it go.
    "a wait is no longer than its phase": (allreduce((10, 15), (40, 50)), {(0, "wait_at_nxn", 1): 5}),
    # Sliced: two reduces to different roots, twice over (two micro-steps).
    "calls are matched by order and root": (
        [
            [(1, "reduce", 0, 0, 10), (1, "reduce", 1, 10, 20), (1, "reduce", 0, 20, 30), (1, "reduce", 1, 30, 40)],
            [(1, "reduce", 0, 3, 8), (1, "reduce", 1, 8, 21), (1, "reduce", 0, 24, 29), (1, "reduce", 1, 29, 44)],
        ],
        {(0, "early_reduce", 1): 3 + 4, (1, "early_reduce", 0): 2 + 1},
    ),
    # Hierarchical: a reduce inside each node, an allreduce among the leaders 0 and 2.
    "ranks that skip a call are not waited for": (
        [
            [(1, "reduce", 0, 0, 10), (1, "allreduce", -1, 10, 30)],
            [(1, "reduce", 0, 4, 9)],
            [(1, "reduce", 2, 0, 15), (1, "allreduce", -1, 15, 30)],
            [(1, "reduce", 2, 7, 14)],
        ],
        {(0, "early_reduce", 1): 4, (0, "wait_at_nxn", 2): 5, (2, "early_reduce", 3): 7},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_who_waits_for_whom(case, tmp_path):
    spans, expected = CASES[case]
    run = read_run(write_run(tmp_path, spans, [0] * len(spans), log=[]))
    assert states_ms(run) == pytest.approx(expected)
    waited = [sum(ms for (place, _, _), ms in expected.items() if place == rank) for rank in range(len(spans))]
    if "wait" not in [name for own in spans for _, name, *_ in own]:
        assert [waits.sum() * 1e-6 for waits in find_waits(run)] == pytest.approx(waited)


def test_tables_by_step_and_by_cause(tmp_path):
    run = read_run(write_run(tmp_path, three_ranks(3), [0, 0, 1]))
    states, steps = find_wait_states(run), np.array([2, 3])
    per_step = states.per_step(steps, 3)
    assert per_step.shape == (2, 3, len(STATES))
    assert per_step[1, 0] * 1e3 == pytest.approx([0, 4, 16, 0])
    assert states.caused(steps, 3) * 1e3 == pytest.approx(np.array([[30, 4, 16]] * 2))


# --- sums ---


def full_step(step, forward=10.0, total=10.0):
    return [(step, "forward", -1, 100 * step, 100 * step + forward), (step, STEP, -1, 100 * step, 100 * step + total)]


def test_phases_that_fill_their_steps_agree(tmp_path):
    spans = [[span for step in range(1, 5) for span in full_step(step, 9.95)] for _ in range(2)]
    run = read_run(write_run(tmp_path, spans, [0, 0]))
    assert check_sums(run, measure(run)) == []


def test_of_several_ranks_the_worst_is_named(tmp_path):
    spans = [[span for step in range(1, 5) for span in full_step(step, forward)] for forward in (9.0, 10.0, 8.0, 9.5)]
    run = read_run(write_run(tmp_path, spans, [0] * 4))
    assert check_sums(run, measure(run)) == [
        "rank 2: phases sum to 0.032 s of 0.040 s in its steps, 2 other ranks likewise"
    ]


def test_what_does_not_add_up_is_said(tmp_path):
    good = [span for step in range(1, 5) for span in full_step(step)]
    gaps = [span for step in range(1, 5) for span in full_step(step, 8.0)]
    log = [{"step": step, "step_s": 0.0105} for step in range(1, 5)]
    run = read_run(write_run(tmp_path, [good, gaps], [0, 0], log=log))
    assert check_sums(run, measure(run)) == [
        "rank 1: phases sum to 0.032 s of 0.040 s in its steps",
        "log.jsonl: 4 steps took 0.042 s, rank 0's trace says 0.040 s",
    ]
    assert check_sums(run, measure(run), tolerance=0.3) == []


# --- traffic ---

LINKS = [
    {"node": node, "host": f"cn{node:02d}", "latency_s": 1e-4, "in": 2e6, "out": 4e6, "both": 2e6} for node in (0, 1)
]


def counted_run(folder):
    """Two nodes, steps of 100 ms: 40 forward, 20 backward, 40 allreduce. Node 1 sends from backward on, at one rate."""
    spans, samples = [[], [], []], [[(0, 0, 0)], [(0, 7, 11)]]
    for step in range(1, 5):
        zero = 100 * step
        for rank in spans:
            rank += [
                (step, "forward", -1, zero, zero + 40),
                (step, "backward", -1, zero + 40, zero + 60),
                (step, "allreduce", -1, zero + 60, zero + 100, 8000),
                (step, STEP, -1, zero, zero + 100),
            ]
        samples[0] += [(zero + 60, 40_000 * (step - 1), 0), (zero + 100, 40_000 * step, 0)]
        samples[1] += [(zero + 40, 7, 11 + 60_000 * (step - 1)), (zero + 100, 7, 11 + 60_000 * step)]
    return read_run(write_run(folder, spans, [0, 0, 1], links=LINKS, samples=samples))


def test_bytes_go_to_the_phases_of_the_nodes_leader(tmp_path):
    run = counted_run(tmp_path)
    times = measure(run)
    traffic = node_traffic(run, times)
    assert traffic.nodes == [0, 1]
    assert traffic.step_bytes("in") == pytest.approx([40_000, 0])
    assert traffic.step_bytes("out") == pytest.approx([0, 60_000])
    assert traffic.bytes["out"][1, 1, INDEX["backward"]] == pytest.approx(20_000)
    assert traffic.bytes["out"][1, 1, INDEX["allreduce"]] == pytest.approx(40_000)
    assert traffic.exchange_rate("out") == pytest.approx([0, 1e6])
    traffic.bytes["in"][:3] = 0
    assert traffic.step_bytes("in").tolist() == [0, 0]
    periodic = node_traffic(run, replace(times, exchange_period=4))
    periodic.bytes["in"][:3] = 0
    assert periodic.step_bytes("in") == pytest.approx([10_000, 0]), "the mean: the median step exchanges nothing"


def test_bytes_between_phases_belong_to_the_step(tmp_path):
    """Of 100 ms, 40 lie in no phase: a pipeline's stage waits there until its sends have left. They hold 3/4 of what
    goes out, a tenth of what comes in. What flows between two steps belongs to neither.
    """
    spans, samples = [], [[], []]
    for step in range(1, 5):
        zero = 200 * step
        spans += [(step, "backward", -1, zero, zero + 60), (step, STEP, -1, zero, zero + 100)]
        past = 100_000 * (step - 1)
        samples[0] += [(zero, past, past), (zero + 60, past + 81_000, past + 20_000)]
        samples[0] += [(zero + 100, past + 90_000, past + 80_000)]
    samples[1] = [(200, 0, 0), (900, 0, 0)]
    run = read_run(write_run(tmp_path, [spans, spans], [0, 1], links=LINKS, samples=samples))
    traffic = node_traffic(run, measure(run))
    assert traffic.step_bytes("in") == pytest.approx([90_000, 0])
    assert traffic.step_bytes("out") == pytest.approx([80_000, 0])
    assert traffic.step_rate("out") == pytest.approx([800_000, 0])
    assert hidden_share(traffic) == pytest.approx([101 / 170] * 4)


def test_counted_bytes_against_links_and_schedule(tmp_path):
    run = counted_run(tmp_path)
    predicted = PredictedExchange([0, 1], np.array([20_000, 10_000]), np.array([0, 60_000]))
    rows = gather(run, measure(run), predicted).numbers()["nodes"]
    assert [row["link_used"] for row in rows] == [{"in": 0.5, "out": 0.0}, {"in": 0.0, "out": pytest.approx(0.25)}]
    assert [row["bytes_over_schedule"] for row in rows] == [{"in": 2.0, "out": None}, {"in": 0.0, "out": 1.0}]


def test_without_the_counters_of_all_nodes_there_is_no_traffic(tmp_path):
    run = counted_run(tmp_path)
    (tmp_path / "traces" / "node-00001.counters").unlink()
    run = read_run(tmp_path)
    assert node_traffic(run, measure(run)) is None
    assert hidden_exchange_s(measure(run), None) is None


def test_what_hides_behind_computing(tmp_path):
    run = counted_run(tmp_path)
    times = measure(run)
    traffic = node_traffic(run, times)
    # A fifth of all bytes went in backward; the rest took 40 ms.
    assert hidden_share(traffic) == pytest.approx([0.2] * 4)
    assert hidden_exchange_s(times, traffic) == pytest.approx(0.010)


def test_waiting_for_a_late_rank_hides_nothing(tmp_path):
    """Without the 10 ms that its leader waits for the others, the exchange that shows takes 30 ms."""
    run = counted_run(tmp_path)
    times = measure(run)
    waiting = np.zeros_like(times.waiting)
    waiting[:, :, INDEX["allreduce"]] = 0.010
    late = replace(times, waiting=waiting)
    assert hidden_exchange_s(late, node_traffic(run, times)) == pytest.approx(0.010 * 30 / 40)


@pytest.mark.parametrize(("share", "rate"), [(0.01, 2e6), (0.03, 6e6)])
def test_a_ports_rate_is_that_of_a_phase_long_enough_to_tell(share, rate):
    """From a fiftieth of the step on: a shorter one holds bytes of what comes before and after it."""
    seconds, amounts = np.zeros((4, 1, len(NAMES))), np.zeros((4, 1, len(NAMES)))
    for name, part, amount in (("allreduce", share, 6e6 * share), ("allgather", 0.5, 1e6), (STEP, 1.0, 9e9)):
        seconds[:, :, INDEX[name]], amounts[:, :, INDEX[name]] = part, amount
    traffic = NodeTraffic([0], {"in": amounts, "out": 0 * amounts}, seconds, None)
    assert traffic.exchange_rate("in") == pytest.approx([rate])
    assert traffic.exchange_rate("out") == [0]
