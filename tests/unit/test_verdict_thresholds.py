"""Where a rule begins to accuse: just below its threshold it is silent, just above it names the culprit.

Times are made up, the same in every step where nothing else is said. docs/diagnosis.md has the thresholds.
"""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.faulty_runs import make
from tests.support.make_run import identify
from traces.read.analysis import StepTimes, measure
from traces.read.runs import Run
from traces.read.trace_files import RankTrace
from traces.read.waits import find_wait_states
from traces.record.files import RECORD
from traces.record.phases import INDEX, NAMES, STEP
from traces.record.steps import SlowSteps, is_regular
from traces.units import bytes_text
from traces.verdict.diagnosis import Diagnosis, compute_or_none, find_bottleneck
from traces.verdict.evidence import Evidence, Finding, PredictedExchange, gather
from traces.verdict.network_rules import (
    exchange_calls,
    latency_bound,
    link_ratios,
    network_congestion,
    server_hotspot,
    slow_link,
)
from traces.verdict.rank_rules import data, imbalance, slow_ranks, stalls, straggler

RATE, LATENCY_S = 50e6, 1e-4


def times_of(step_s: float, phases: dict) -> StepTimes:
    """phases: {name: (S, R) seconds}; every step lasts step_s, and the next begins at once."""
    steps, ranks = np.shape(next(iter(phases.values())))
    seconds = np.zeros((steps, ranks, len(NAMES)))
    for name, values in phases.items():
        seconds[:, :, INDEX[name]] = values
    seconds[:, :, INDEX[STEP]] = step_s
    start = np.broadcast_to(np.arange(steps)[:, None] * round(step_s * 1e9), (steps, ranks))
    end = start + round(step_s * 1e9)
    nothing = [np.zeros(0, np.int64)] * ranks
    return StepTimes(np.arange(1, steps + 1), 0, start, end, seconds, np.zeros_like(seconds), nothing, nothing)


def evidence(
    step_s, nodes=None, links=(), end_links=None, traffic=None, predicted=None, transfer_s=0.0, calls=(), **phases
) -> Evidence:
    """One rank a node. calls: (phase, root, bytes) that every rank makes in step 1."""
    times = times_of(step_s, phases)
    ranks = times.seconds.shape[1]
    nodes = nodes or list(range(ranks))
    records = np.array([(1, INDEX[phase], root, 0, 1, size) for phase, root, size in calls], RECORD)
    traces = [RankTrace(identity, {"error_ns": 0}, records) for identity in identify(nodes, "ring")]
    run = Run(Path(), {"settings": {}, "links": list(links)}, [], traces, end_links=end_links or {})
    return Evidence(run, times, traffic, predicted, None, None, np.full(len(times.steps), step_s - transfer_s))


def links_of(rates_in, rates_out=None, latency_s=LATENCY_S) -> list[dict]:
    pairs = zip(rates_in, rates_out or [RATE] * len(rates_in), strict=True)
    return [
        {"node": node, "host": f"cn{node:02d}", "in": into, "out": out, "both": min(into, out), "latency_s": latency_s}
        for node, (into, out) in enumerate(pairs)
    ]


def computing(*factors, steps=20) -> np.ndarray:
    """(S, R) seconds: 0.1 s a step, times each rank's factor."""
    return np.tile(np.array(factors) * 0.1, (steps, 1))


# --- one slow rank ---


@pytest.mark.parametrize(
    ("factors", "step_s", "named"),
    [
        ((1, 1, 1, 1.11, 1), 0.15, []),
        ((1, 1, 1, 1.13, 1), 0.15, [3]),
        # 50 ms more than the others: a twentieth of the step is worth a name.
        ((1, 1, 1, 1.5, 1), 0.99, [3]),
        ((1, 1, 1, 1.5, 1), 1.01, []),
        # Where all ranks differ, a slow one must differ by four deviations.
        ((0.9, 0.95, 1, 1.05, 1.1, 1.35), 0.2, []),
        ((0.9, 0.95, 1, 1.05, 1.1, 1.75), 0.2, [5]),
    ],
)
def test_a_rank_is_slow_from_an_eighth_more_time_on(factors, step_s, named):
    found = evidence(step_s, forward=computing(*factors))
    assert slow_ranks(found) == named
    assert [one.rank for one in straggler(found)] == named
    assert imbalance(found) == [], "one rank is not several"


@pytest.mark.parametrize(("slow_steps", "named"), [(74, []), (76, [1])])
def test_a_slow_rank_is_slow_in_three_of_four_steps(slow_steps, named):
    compute = computing(1, 1, 1, 1, steps=100)
    compute[:slow_steps, 1] *= 1.5
    assert slow_ranks(evidence(0.3, forward=compute)) == named


# --- uneven work ---


@pytest.mark.parametrize(
    ("factor", "uneven_steps", "is_uneven"), [(1.24, 100, False), (1.26, 100, True), (1.5, 74, False), (1.5, 76, True)]
)
def test_work_is_uneven_from_a_quarter_more_on_in_three_of_four_steps(factor, uneven_steps, is_uneven):
    compute = computing(1, 1, 1, 1, 1, 1, steps=100)
    compute[:uneven_steps, 2:5] *= factor
    assert bool(imbalance(evidence(0.2, forward=compute))) == is_uneven


def test_uneven_work_is_in_the_phase_that_takes_longest():
    (found,) = imbalance(evidence(0.3, compute=computing(1, 1, 1.5, 1.5, 1.5, 1)))
    assert found.phase == "compute"


# --- stalls: their lengths are in steps of one second ---


def stalled(steps, *lengths, ranks=4, noise=0.0) -> Evidence:
    """lengths: (rank, seconds) of a stall each, in steps of their own, in forward."""
    forward = np.full((steps, ranks), 0.2) + noise * (-1.0) ** np.add.outer(np.arange(steps), np.arange(ranks))
    for number, (rank, seconds) in enumerate(lengths):
        forward[3 + 2 * number, rank] += seconds
    rest = 5.0 - forward  # in the exchange, where all wait for the one that stalls
    made = evidence(1.0, forward=forward, wait=rest)
    made.times.seconds[:, :, INDEX[STEP]] = 5.0
    made.__dict__["step_s"] = 1.0
    return made


@pytest.mark.parametrize(
    ("steps", "lengths", "named"),
    [
        (20, [(2, 0.29)] * 2, []),
        (20, [(2, 0.31)] * 2, [2]),
        # One stall is chance.
        (20, [(2, 1.0)], []),
        # A rank has three fifths of all stalls, or it is not named.
        (20, [(0, 0.59)] * 2 + [(3, 0.4)] * 2, []),
        (20, [(0, 0.62)] * 2 + [(3, 0.4)] * 2, [0]),
        # They cost a fiftieth of the time.
        (49, [(2, 0.5)] * 2, [2]),
        (51, [(2, 0.5)] * 2, []),
    ],
)
def test_a_stall_is_longer_than_three_tenths_of_a_step(steps, lengths, named):
    assert [one.rank for one in stalls(stalled(steps, *lengths))] == named


@pytest.mark.parametrize(("seconds", "named"), [(0.55, []), (0.75, [1])])
def test_a_stall_stands_out_of_what_the_ranks_times_vary(seconds, named):
    """They vary by 0.07 s, a deviation of 0.1: six of them count."""
    assert [one.rank for one in stalls(stalled(20, (1, seconds), (1, seconds), ranks=2, noise=0.07))] == named


@pytest.mark.parametrize(("trace", "named"), [("on", []), ("1:20000", [2])])
def test_steps_traced_because_they_were_slow_make_no_stall_frequent(trace, named):
    """Once in 211 steps costs a third of a percent, but many of these steps are in a thinned trace."""
    slow = SlowSteps()
    kept = [step for step in range(1, 20_001) if slow.is_kept(1.6 if step % 211 == 0 else 1.0) or is_regular(step)]
    made = stalled(len(kept))
    made.times.steps[:] = kept
    made.times.seconds[made.times.steps % 211 == 0, 2, INDEX["forward"]] += 0.6
    made.times.seconds[made.times.steps % 211 == 0, 2, INDEX["wait"]] -= 0.6
    made.run.config["settings"]["trace"] = trace
    assert [one.rank for one in stalls(made)] == named


def test_waiting_is_no_ranks_own_time():
    """The others wait while one stalls: they have not stalled."""
    made = stalled(20, (2, 1.0), (2, 1.0))
    assert made.own == pytest.approx(made.times.phase("forward"))


# --- data ---


@pytest.mark.parametrize(("seconds", "is_late"), [(0.24, False), (0.26, True)])
def test_data_on_all_ranks_count_from_a_quarter_of_the_step_on(seconds, is_late):
    assert bool(data(evidence(1.0, forward=computing(1, 1, 1), data=np.full((20, 3), seconds)))) == is_late


def test_where_two_ranks_data_come_late_none_is_named_alone():
    late = np.tile([0.0, 0.1, 0.2, 0.0, 0.0], (20, 1))
    assert data(evidence(1.0, forward=computing(1, 1, 1, 1, 1), data=late)) == []
    (found,) = data(evidence(1.0, forward=computing(1, 1, 1, 1, 1), data=late * [1, 0, 1, 1, 1]))
    assert (found.rank, found.seconds) == (2, pytest.approx(0.2))


@pytest.mark.parametrize(
    ("seconds", "nodes", "place", "said"),
    [
        ([0, 0, 0.4, 0.4], [0, 0, 1, 1], (None, 1), "cn01 waits 400 ms a step for its data, the others 0 ms"),
        ([0, 0.6, 0.6, 0], [0, 0, 1, 1], (None, None), "takes 0.60 s of a 1.00 s step on ranks 1, 2: put"),
        ([0.3, 0.3, 0.3, 0.3], [0, 0, 1, 1], (None, None), "takes 300 ms of a 1.00 s step on every rank: put"),
    ],
)
def test_late_data_name_the_ranks_that_are_late(seconds, nodes, place, said):
    (found,) = data(evidence(1.0, nodes=nodes, forward=computing(1, 1, 1, 1), data=np.tile(seconds, (20, 1))))
    assert ((found.rank, found.node), found.seconds) == (place, pytest.approx(max(seconds)))
    assert said in found.sentence


# --- ports ---


def exchanging(transfer_s=0.5, ranks=5, compute_s=0.1, **more) -> Evidence:
    """Steps of a second; the exchange takes `transfer_s` of it."""
    exchange = np.full((20, ranks), transfer_s)
    return evidence(1.0, forward=np.full((20, ranks), compute_s), allreduce=exchange, transfer_s=transfer_s, **more)


@pytest.mark.parametrize(
    ("ratio", "transfer_s", "named"),
    [(0.62, 0.5, []), (0.58, 0.5, [2]), (0.5, 0.099, []), (0.5, 0.101, [2])],
)
def test_a_port_is_slow_below_six_tenths_of_the_others_rate(ratio, transfer_s, named):
    """And named if that costs a twentieth of the step."""
    links = links_of([RATE, RATE, ratio * RATE, RATE, RATE])
    assert [one.node for one in slow_link(exchanging(transfer_s, links=links))] == named


def test_of_two_nodes_the_faster_way_is_what_is_usual():
    """The one's way out is the other's way in."""
    ratios = link_ratios([{"in": 40.0, "out": 10.0}, {"in": 10.0, "out": 44.0}])
    assert ratios["in"] == pytest.approx([1, 1 / 4])
    assert ratios["out"] == pytest.approx([1 / 4, 1.1])


@pytest.mark.parametrize(("carried", "named"), [(0.58, [2]), (0.62, [])])
def test_a_port_that_carried_more_than_was_probed_is_not_slow(carried, named):
    """Over the whole run: a burst may do so for a while."""
    links = links_of([RATE, RATE, RATE / 4, RATE, RATE])
    rates = np.array([0.1, 0.1, carried, 0.1, 0.1]) * RATE
    traffic = SimpleNamespace(nodes=list(range(5)), step_rate=lambda way: rates, step_bytes=lambda way: rates)
    assert [one.node for one in slow_link(exchanging(links=links, traffic=traffic))] == named


@pytest.mark.parametrize(
    ("before", "after", "named"), [(0.5, 0.5, [2]), (0.5, 0.62, []), (0.62, 0.5, []), (0.5, 2, [])]
)
def test_a_port_is_slow_if_it_is_before_the_run_and_after_it(before, after, named):
    start, end = (links_of([RATE, RATE, part * RATE, RATE, RATE]) for part in (before, after))
    found = exchanging(links=start, end_links={link["node"]: link for link in end})
    assert [one.node for one in slow_link(found)] == named
    changed = (
        f"cn02's port carried {bytes_text(before * RATE)}/s in before the run and {bytes_text(after * RATE)}/s after"
    )
    assert (changed in " ".join(found._link_doubts())) == (after == 2)


@pytest.mark.parametrize(("transfer_s", "is_long"), [(0.29, False), (0.31, True)])
def test_an_exchange_holds_a_step_up_from_three_tenths_of_it_on(transfer_s, is_long):
    assert bool(network_congestion(exchanging(transfer_s))) == is_long


@pytest.mark.parametrize(
    ("bytes_in", "bytes_out", "phases", "direction"),
    [
        (1.2, (1, 1), ("reduce",), None),
        (1.3, (1, 1), ("reduce",), "in"),
        (1.3, (5, 5), ("reduce", "bcast"), "in"),
        (1.5, (3, 1), ("reduce",), "in"),
        (1.0, (3, 1), ("reduce",), None),
    ],
)
def test_a_hot_spot_carries_a_quarter_more_than_the_other_nodes(bytes_in, bytes_out, phases, direction):
    """The direction of the verdict decides. The port sends bytes_out[0] MB, each other port bytes_out[1] MB."""
    server_out, others_out = bytes_out
    amounts = [np.array([server, *[others] * 4]) * 1e6 for server, others in ((bytes_in, 1), (server_out, others_out))]
    predicted = PredictedExchange(list(range(5)), *amounts)
    exchange = dict.fromkeys(phases, np.full((20, 5), 0.25))
    links = links_of([RATE] * 5)
    calls = [("reduce", 0, 100)]
    found = server_hotspot(evidence(1.0, transfer_s=0.5, predicted=predicted, links=links, calls=calls, **exchange))
    named = [(0, direction, "reduce")] if direction else []
    assert [(one.node, one.direction, one.phase) for one in found] == named


def test_copies_to_a_gpu_are_no_exchanges():
    calls = [("allreduce", -1, 1000), ("copy_out", -1, 4000), ("copy_in", -1, 4000), ("allreduce", -1, 8)]
    assert exchange_calls(exchanging(calls=calls)) == (0.05, 1000)


def small_messages(share, latencies) -> Evidence:
    """The exchange takes 0.5 s of a step of a second; its bytes need `share` of that, one message so many latencies."""
    amounts = np.full(3, share * 0.5 * RATE)
    predicted = PredictedExchange([0, 1, 2], amounts, amounts)
    size = round(latencies * LATENCY_S * RATE)
    return exchanging(ranks=3, predicted=predicted, links=links_of([RATE] * 3), calls=[("allreduce", -1, size)])


@pytest.mark.parametrize(
    ("share", "latencies", "is_bound"), [(0.24, 1, True), (0.26, 1, False), (0.1, 49, True), (0.1, 51, False)]
)
def test_small_messages_need_a_quarter_of_the_time_and_fifty_latencies_at_most(share, latencies, is_bound):
    assert bool(latency_bound(small_messages(share, latencies))) == is_bound


# --- the whole verdict ---


@pytest.mark.parametrize(("exchange_s", "advice"), [(0.29, "more ranks would help"), (0.31, "then a shorter exchange")])
def test_beside_a_long_exchange_more_ranks_are_no_advice(exchange_s, advice):
    assert compute_or_none(exchanging(exchange_s, compute_s=0.6)).sentence.endswith(advice)


@pytest.mark.parametrize(("seconds", "kind"), [(0.49, "none"), (0.51, "compute-bound")])
def test_computing_is_the_verdict_from_half_of_the_step_on(seconds, kind):
    assert compute_or_none(evidence(1.0, forward=np.full((20, 2), seconds))).kind == kind


def test_an_exchange_shorter_than_computing_holds_nothing_up(tmp_path):
    """Two fifths of the step is exchange, yet faster kernels help more."""
    found = find_bottleneck(*measured(make(tmp_path, strategy="reduce-bcast", compute_ms=2000.0)))
    assert 0.3 < found.evidence.transfer_s / found.evidence.step_s < 0.5
    assert found.finding.kind == "compute-bound"


def measured(run):
    return run, measure(run)


@pytest.mark.parametrize(("steps", "is_thin"), [(6, True), (7, False)])
def test_fewer_than_five_steps_are_few(steps, is_thin, tmp_path):
    """Two more are the warm-up."""
    thin = gather(*measured(make(tmp_path, steps=steps))).thin
    assert any("measured" in sentence for sentence in thin) == is_thin


def test_steps_that_no_phase_explains_make_a_verdict_uncertain(tmp_path):
    run = make(tmp_path)
    assert gather(*measured(run)).thin == []
    records = run.ranks[4].records
    lost = records["phase"] == INDEX["backward"]
    records["end"][lost] -= (0.9 * (records["end"] - records["start"])[lost]).astype(np.int64)
    (sentence,) = gather(*measured(run)).thin
    assert sentence.startswith("rank 4: phases sum to")


@pytest.mark.parametrize(("times_the_median", "is_thin"), [(0.9, False), (1.1, True)])
def test_clocks_count_as_vague_beyond_the_median_wait(times_the_median, is_thin, tmp_path):
    run = make(tmp_path)
    run.ranks[2].clock["error_ns"] = times_the_median * np.median(find_wait_states(run).seconds) * 1e9
    assert any("clocks may be" in sentence for sentence in gather(*measured(run)).thin) == is_thin


ADVISED, UNCLEAR = "ring would take 0.90 s a step instead of 1.00 s", "no clear winner among other strategies: ring"


@pytest.mark.parametrize(
    ("predicted_s", "ends", "compared", "said"),
    [
        (0.92, [0.9, 0.95], "faster", None),
        (0.9, [0.85, 0.95], "faster", ADVISED),
        (0.9, [0.8, 1.05], "no clear winner", f"{UNCLEAR} would take 0.80 to 1.05 s a step"),
        (0.99, [0.92, 1.05], "no clear winner", None),
        (1.2, [1.1, 1.3], "slower", None),
    ],
)
def test_another_strategy_is_advised_from_a_tenth_on(predicted_s, ends, compared, said):
    made = exchanging(predicted=PredictedExchange(list(range(5)), np.ones(5), np.ones(5)))
    made.__dict__["thin"] = []
    finding = Finding("network-congestion", 0.5, "slow", "the network is slow")
    row = {"strategy": "ring", "same_weights": True, "predicted_step_s": predicted_s, "speedup": 1 / predicted_s}
    advice = [row | {"range_s": ends, "compared": compared}]
    model = {"reason": None, "advised": "ring" if compared == "faster" else None}
    verdict = Diagnosis(finding, [], made).verdict(advice, model)
    assert verdict == (f"the network is slow; {said}" if said else "the network is slow")


def test_a_finding_takes_no_more_than_the_step(tmp_path):
    """A stall's seconds, or a sum of phases, may be longer than the median step."""
    found = find_bottleneck(*measured(make(tmp_path)))
    longer = Diagnosis(Finding("data", 5 * found.evidence.step_s, "late", "late"), [], found.evidence)
    assert longer.answer([])["bottleneck"]["share"] == 1
