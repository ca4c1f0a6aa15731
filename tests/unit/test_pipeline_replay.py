"""Replays of pipelines: by hand where copies share ports, by another simulation where no port is waited for."""

import numpy as np
import pytest

from dist.cost.model import Cluster
from dist.cost.model_parallel import Seats
from dist.cost.pipeline_replay import PipelineStep, replayed_ends_s
from strategies import STRATEGIES
from tests.unit.test_advised_shapes import BABY, cluster, step_of, workload
from tests.unit.test_cost_of_cuts import by_events, closed_form, plans

pytestmark = pytest.mark.any_mpi
MB = 1_000_000  # a second of a port's


def ends(nodes, parts, stages, lists, forward_s=1.0, backward_s=2.0, rows=MB, embedding=0, share=1.0, **changes):
    """When the stages end, of ports of 1 MB/s that serve whole messages, and no latency."""
    rates = {"rate_in": MB, "rate_out": MB, "latency_s": 0.0, "queue_bytes": 1e9} | changes
    library = rates.pop("library", "mpich")
    seats = Seats(Cluster(nodes, nominal=False, **rates), parts, stages)
    seconds = (np.broadcast_to(of, stages).astype(float) for of in (forward_s, backward_s))
    return replayed_ends_s(PipelineStep(lists, *seconds, rows, embedding, share), seats, library)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_where_no_port_is_waited_for_as_another_simulation_has_it(schedule, seed):
    """A message is under way for less than the stage computes that sends it: every copy on nodes of its own."""
    random = np.random.default_rng(seed)
    stages, copies, micro_steps = map(int, random.integers((2, 1, 1), (5, 4, 12)))
    forward_s, backward_s = random.uniform(0.5, 2, (2, stages))
    lists = plans(schedule, stages, micro_steps)
    found = ends(list(range(stages * copies)), 1, stages, lists, forward_s, backward_s, rows=MB // 4)
    assert found == pytest.approx(by_events(lists, forward_s, backward_s, 0.25))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_short_hops_by_the_closed_form(schedule):
    tau_s = np.array([3.0, 3.0, 3.0, 3.0])
    found = ends([0, 1, 2, 3], 1, 4, plans(schedule, 4, 8), tau_s / 3, 2 * tau_s / 3, rows=MB // 1000)
    hops_s = found.max() - closed_form(tau_s, 8)
    assert 6 * 1e-3 - 1e-9 <= hops_s <= 20 * 1e-3


def test_two_copies_go_through_one_port_in_turn():
    """Both forwards end at 1; rows come at 2 and 3, so the last stages end at 5 and 6, and their gradients come at 6
    and 7."""
    found = ends([0, 0, 1, 1], 1, 2, plans("gpipe", 2, 1))
    assert found.tolist() == [9, 6]


def test_nobody_waits_for_a_send():
    """Three forwards end at 1, 2, 3, and their rows come at 3, 5 and 7; then three backwards of 2 and 2 s of the first
    gradient's way, as long as a backward takes."""
    found = ends([0, 1], 1, 2, plans("gpipe", 2, 3), rows=2 * MB)
    assert found.tolist() == [8 + 6 + 2 + 2, 8 + 6]


def test_a_slow_port_is_its_own_stages_alone():
    """Of three stages the last has a quarter of the others' rate: hops of 0.25 and 1 s, there and back."""
    rates = np.array([1, 1, 0.25]) * MB
    found = ends([0, 1, 2], 1, 3, plans("1f1b", 3, 1), rows=MB // 4, rate_in=rates, rate_out=rates)
    assert found.tolist() == pytest.approx([9 + 2.5, 7 + 2.25, 5 + 1.25])


def test_parts_send_their_share_and_wait_for_all_shares():
    """Half of the rows on each of two ports: one part's takes twice as long, and from the next stage the other's."""
    rates = np.array([1, 0.5, 0.5, 1, 1, 1]) * MB
    found = ends([0, 1, 2, 3, 4, 5], 2, 3, plans("1f1b", 3, 1), rate_out=rates)
    down_s, up_s = 1 + 1 + 1 + 1, 0.5 + 2 + 1 + 2
    assert found.tolist() == pytest.approx([down_s + 3 + up_s, down_s + 3 + 2.5, down_s + 3])


def test_a_head_is_lent_before_the_rows_and_returned_before_theirs():
    """2 s of it leave at 0, and the first rows, which end at 1, queue behind: they come at 3. The head is half of the
    last stage: its gradient leaves at 3 + 1 + 1, and the rows' from 7 on, as the head's has come then."""
    found = ends([0, 1], 1, 2, plans("1f1b", 2, 1), embedding=2 * MB, share=0.5)
    assert found.tolist() == [8 + 2, 6]


def test_a_head_on_a_way_of_its_own():
    """In three stages it takes turns with the rows at the first port. The last stage has made its layers at 2.25, and
    has the head at 3.4. Three quarters of a backward later its gradient leaves, which the first stage waits for."""
    ports = {"queue_bytes": 1e4, "embedding": 3_400_000, "share": 0.75}
    found = ends([0, 1, 2], 1, 3, plans("1f1b", 3, 1), backward_s=1.0, rows=4, **ports)
    assert found == pytest.approx([3.4 + 0.75 + 0.75 + 3.4, 3.4 + 0.75 + 1 + 1, 3.4 + 0.75 + 1], abs=0.03)


def test_a_large_head_waits_until_it_is_asked_for():
    """4 MB under MPICH: the last stage asks when its first rows have come, at 1 s, and the first stage for the gradient
    when its last backward begins."""
    found = ends([0, 1, 2], 1, 3, plans("1f1b", 3, 1), rows=4, embedding=4 * MB)
    last_s = 2 + 4 + 1 + 2
    assert found == pytest.approx([last_s + 2 + 4, last_s + 2, last_s + 2 + 4], abs=1e-4)


@pytest.mark.parametrize(("library", "ends_s"), [("openmpi", [15.8, 13.8]), ("mpich", [15.6, 10.4])])
def test_large_rows_that_cross_are_under_way_one_after_the_other(library, ends_s):
    """Of two micro-steps, rows of 3.2 s come down at 4.2 and 7.4, and the first gradient is made at 7.2. Under Open MPI
    it waits for the rows, and the last stage for its second one to leave, as the socket does not take it in."""
    found = ends([0, 1], 1, 2, plans("1f1b", 2, 2), rows=3_200_000, library=library)
    assert found == pytest.approx(ends_s)


def test_ranks_that_wait_in_a_circle_are_refused():
    turned_round = [[("backward", 0), ("forward", 0)], [("forward", 0), ("backward", 0)]]
    with pytest.raises(ValueError, match="2 of 2 ranks wait for one another"):
        ends([0, 1], 1, 2, turned_round)


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
    assert found.simulated.micro_steps == 16
    assert found.ends_s == pytest.approx(found._replayed_s(200), rel=0.02)
    assert found.ends_s.max() > 200 * 2 * 4 * 64 * 128 / 1e6


def test_exchanges_of_parts_share_their_ports():
    """Two rings on one port take twice as long as one. Where pairs exchange one way after the other, the other ring
    has the port meanwhile."""
    found, _ = step_of(workload(BABY, 8), cluster([0, 0, 1, 1], rate=5e6), 2, 1, "mpich")
    pieces_s = 4 * sum(layout.count for layout in found.layouts) / 5e6
    assert found.exchange_s(STRATEGIES["ring"], False) == pytest.approx(pieces_s, rel=0.02)
    assert found.exchange_s(STRATEGIES["allreduce"], False) == pytest.approx(pieces_s, rel=0.02)
