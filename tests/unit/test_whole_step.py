"""Replays of whole steps: by hand where copies share ports, by another simulation where no port is waited for."""

from dataclasses import replace

import numpy as np
import pytest

from dist.cost.model import Cluster
from dist.cost.model_parallel import Seats
from dist.cost.stages import barrier, stage
from dist.cost.whole_step import PipelineStep, WholeStep
from strategies import STRATEGIES
from tests.unit.test_advised_shapes import BABY, cluster, step_of, workload
from tests.unit.test_cost_of_cuts import by_events, closed_form, plans

pytestmark = pytest.mark.any_mpi
MB = 1_000_000  # a second of a port's


def whole_step(nodes, parts, stages, lists, forward_s=1.0, backward_s=2.0, rows=MB, embedding=0, share=1.0, **changes):
    """Ports of 1 MB/s that serve whole messages, and no latency."""
    rates = {"rate_in": MB, "rate_out": MB, "latency_s": 0.0, "queue_bytes": 1e9} | changes
    library = rates.pop("library", "mpich")
    seats = Seats(Cluster(nodes, nominal=False, **rates), parts, stages)
    seconds = (np.broadcast_to(of, stages).astype(float) for of in (forward_s, backward_s))
    return WholeStep(PipelineStep(lists, *seconds, rows, embedding, share), seats, library)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_where_no_port_is_waited_for_as_another_simulation_has_it(schedule, seed):
    """A message is under way for less than the stage computes that sends it: every copy on nodes of its own."""
    random = np.random.default_rng(seed)
    stages, copies, micro_steps = map(int, random.integers((2, 1, 1), (5, 4, 12)))
    forward_s, backward_s = random.uniform(0.5, 2, (2, stages))
    lists = plans(schedule, stages, micro_steps)
    found = whole_step(list(range(stages * copies)), 1, stages, lists, forward_s, backward_s, rows=MB // 4)
    assert found.ends_s == pytest.approx(by_events(lists, forward_s, backward_s, 0.25))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_short_hops_by_the_closed_form(schedule):
    tau_s = np.array([3.0, 3.0, 3.0, 3.0])
    found = whole_step([0, 1, 2, 3], 1, 4, plans(schedule, 4, 8), tau_s / 3, 2 * tau_s / 3, rows=MB // 1000)
    hops_s = found.ends_s.max() - closed_form(tau_s, 8)
    assert 6 * 1e-3 - 1e-9 <= hops_s <= 20 * 1e-3


def test_two_copies_go_through_one_port_in_turn():
    """Both forwards end at 1; rows come at 2 and 3, so the last stages end at 5 and 6, and their gradients come at 6
    and 7."""
    found = whole_step([0, 0, 1, 1], 1, 2, plans("gpipe", 2, 1))
    assert found.ends_s.tolist() == [9, 6]


def test_nobody_waits_for_a_send():
    """Three forwards end at 1, 2, 3, and their rows come at 3, 5 and 7; then three backwards of 2 and 2 s of the first
    gradient's way, as long as a backward takes."""
    found = whole_step([0, 1], 1, 2, plans("gpipe", 2, 3), rows=2 * MB)
    assert found.ends_s.tolist() == [8 + 6 + 2 + 2, 8 + 6]


def test_a_slow_port_is_its_own_stages_alone():
    """Of three stages the last has a quarter of the others' rate: hops of 0.25 and 1 s, there and back."""
    rates = np.array([1, 1, 0.25]) * MB
    found = whole_step([0, 1, 2], 1, 3, plans("1f1b", 3, 1), rows=MB // 4, rate_in=rates, rate_out=rates)
    assert found.ends_s.tolist() == pytest.approx([9 + 2.5, 7 + 2.25, 5 + 1.25])


def test_parts_send_their_share_and_wait_for_all_shares():
    """Half of the rows on each of two ports: one part's takes twice as long, and from the next stage the other's."""
    rates = np.array([1, 0.5, 0.5, 1, 1, 1]) * MB
    found = whole_step([0, 1, 2, 3, 4, 5], 2, 3, plans("1f1b", 3, 1), rate_out=rates)
    down_s, up_s = 1 + 1 + 1 + 1, 0.5 + 2 + 1 + 2
    assert found.ends_s.tolist() == pytest.approx([down_s + 3 + up_s, down_s + 3 + 2.5, down_s + 3])


def test_a_head_is_lent_before_the_rows_and_returned_before_theirs():
    """2 s of it leave at 0, and the first rows, which end at 1, queue behind: they come at 3. The head is half of the
    last stage: its gradient leaves at 3 + 1 + 1, and the rows' from 7 on, as the head's has come then."""
    found = whole_step([0, 1], 1, 2, plans("1f1b", 2, 1), embedding=2 * MB, share=0.5)
    assert found.ends_s.tolist() == [8 + 2, 6]


def test_a_head_on_a_way_of_its_own():
    """In three stages it takes turns with the rows at the first port. The last stage has made its layers at 2.25, and
    has the head at 3.4. Three quarters of a backward later its gradient leaves, which the first stage waits for."""
    ports = {"queue_bytes": 1e4, "embedding": 3_400_000, "share": 0.75}
    found = whole_step([0, 1, 2], 1, 3, plans("1f1b", 3, 1), backward_s=1.0, rows=4, **ports)
    assert found.ends_s == pytest.approx([3.4 + 0.75 + 0.75 + 3.4, 3.4 + 0.75 + 1 + 1, 3.4 + 0.75 + 1], abs=0.03)


def test_a_large_head_waits_until_it_is_asked_for():
    """4 MB under MPICH: the last stage asks when its first rows have come, at 1 s, and the first stage for the gradient
    when its last backward begins."""
    found = whole_step([0, 1, 2], 1, 3, plans("1f1b", 3, 1), rows=4, embedding=4 * MB)
    last_s = 2 + 4 + 1 + 2
    assert found.ends_s == pytest.approx([last_s + 2 + 4, last_s + 2, last_s + 2 + 4], abs=1e-4)


@pytest.mark.parametrize(("library", "ends_s"), [("openmpi", [15.8, 13.8]), ("mpich", [15.6, 10.4])])
def test_large_rows_that_cross_are_under_way_one_after_the_other(library, ends_s):
    """Of two micro-steps, rows of 3.2 s come down at 4.2 and 7.4, and the first gradient is made at 7.2. Under Open MPI
    it waits for the rows, and the last stage for its second one to leave, as the socket does not take it in."""
    found = whole_step([0, 1], 1, 2, plans("1f1b", 2, 2), rows=3_200_000, library=library)
    assert found.ends_s == pytest.approx(ends_s)


def exchanged(nodes, parts, stages, exchanges, **changes):
    """When all have exchanged, of one micro-step in which each stage takes 1 + 2 s and messages no time."""
    return whole_step(nodes, parts, stages, plans("1f1b", stages, 1), rows=0, **changes).end_s(exchanges)


def test_pieces_share_the_ports():
    """Two parts of two copies on two nodes: both send from the first node to the second."""
    send = [stage([0], [1], MB)]
    assert exchanged([0, 0, 1, 1], 2, 1, {(0, 0): send, (0, 1): send}) == pytest.approx(3 + 2)
    assert exchanged([0, 0, 1, 1], 2, 1, {(0, 0): send, (0, 1): []}) == pytest.approx(3 + 1)


def test_the_last_stage_exchanges_while_the_first_computes():
    """Two stages of two copies over four nodes: the last is through at 1 + 3, the first at 6."""
    send = [stage([0], [1], 5 * MB // 2)]
    assert exchanged([0, 1, 2, 3], 1, 2, {(0, 0): [], (1, 0): send}) == pytest.approx(4 + 2.5)
    assert exchanged([0, 1, 2, 3], 1, 2, {(0, 0): send, (1, 0): send}) == pytest.approx(6 + 2.5)


def test_the_norm_is_of_all_pieces():
    send = [stage([0], [1], MB)]
    halves = {(0, 0): [*send, barrier(), *send], (1, 0): [barrier(), stage([0], [1], MB, repeat=3)]}
    assert exchanged([0, 1, 2, 3], 1, 2, halves) == pytest.approx(6 + 1 + 3), "of the last stage, which came first"


def test_who_meets_goes_on_when_all_messages_are_there():
    """One way takes three times as long as the other; nobody sends before."""
    unequal = stage([0, 1], [1, 0], [MB, 3 * MB], all_together=True)
    assert exchanged([0, 1], 1, 1, {(0, 0): [unequal, stage([0], [1], MB)]}) == pytest.approx(3 + 3 + 1)


def test_a_ring_begins_when_its_ranks_are_there_and_goes_round_on_shared_ports():
    """Two parts' rings, each of them both ways at once; 0.1 s a step; what is added meanwhile takes no longer."""
    ring = [stage([0, 1], [1, 0], MB, steps=3, added_meanwhile=10, all_together=True, repeat=2)]
    shared = exchanged([0, 0, 1, 1], 2, 1, {(0, 0): ring, (0, 1): ring}, latency_s=0.1, add_rate=1e3)
    assert shared == pytest.approx(3 + 2 * 2 + 2 * 3 * 0.1)
    slow = exchanged([0, 0, 1, 1], 2, 1, {(0, 0): ring, (0, 1): []}, latency_s=0.1, add_rate=1.0)
    assert slow == pytest.approx(3 + 2 * 10 + 2 * 3 * 0.1)
    local = [stage([0, 1], [1, 0], MB, all_together=True)]
    assert exchanged([0, 0], 1, 1, {(0, 0): local}, local_rate=MB / 4) == pytest.approx(3 + 4)


def test_ranks_that_wait_in_a_circle_are_refused():
    turned_round = [[("backward", 0), ("forward", 0)], [("forward", 0), ("backward", 0)]]
    step = whole_step([0, 1], 1, 2, turned_round)
    with pytest.raises(ValueError, match="2 of 2 ranks wait for one another"):
        step.ends_s  # noqa: B018


# --- in advise.py's shapes ---


def test_few_messages_are_replayed_and_many_are_not():
    """Two stages of two copies, four ranks: 2 x 2 messages a micro-step, of at most 16 micro-steps."""
    assert step_of(workload(BABY, 600), cluster([0, 1, 2, 3]), 1, 2, "mpich")[0].is_replayed
    assert not step_of(workload(BABY, 1), cluster([0]), 1, 1, "mpich")[0].is_replayed
    many, _ = step_of(workload(BABY, 64), cluster([rank // 4 for rank in range(64)]), 2, 4, "mpich")
    assert not many.is_replayed


def test_a_long_step_goes_on_as_it_began_in_a_replay():
    """Of 200 micro-steps 16 are replayed: the port of two copies is what they wait for, 2 x 32 KiB a micro-step."""
    found, _ = step_of(workload(BABY, 400, compute_s=1e-3), cluster([0, 0, 1, 1], rate=1e6), 1, 2, "mpich")
    whole = found._new_replay(200).ends_s
    assert found.simulated.micro_steps == 16
    assert found.ends_s == pytest.approx(whole, rel=0.02)
    assert found.ends_s.max() > 200 * 2 * 4 * 64 * 128 / 1e6


def test_an_exchange_is_replayed_unless_it_goes_on_meanwhile():
    """Two parts' rings on one port: twice as long as one alone. What is hidden, or made in each micro-step, is what the
    formula says."""
    found, _ = step_of(workload(BABY, 8), cluster([0, 0, 1, 1], rate=5e6), 2, 1, "mpich")
    formula = replace(found)
    formula.__dict__["is_replayed"] = False
    ring, zero_3 = STRATEGIES["ring"], STRATEGIES["zero-3"]
    pieces = sum(shard.layout.count for shard in found.shards)
    assert found.exchange_s(ring, False) == pytest.approx(4 * pieces / 5e6, rel=0.02)
    assert found.exchange_s(ring, True) == formula.exchange_s(ring, True)
    assert found.exchange_s(zero_3, False) == formula.exchange_s(zero_3, False)
    assert found.exchange_s(ring, False) != formula.exchange_s(ring, False)
