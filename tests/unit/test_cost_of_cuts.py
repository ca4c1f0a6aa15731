"""The cost of models that ranks share: a pipeline's step, bytes, and ports that several groups share, worked out by
hand, by the closed form, and by another simulation."""

import heapq

import numpy as np
import pytest

from dist.cost.model import Cluster
from dist.cost.model_parallel import Head, Seats, head_bytes, pipeline_bytes, simulate, tensor_bytes
from gpt2.pipeline import SCHEDULES
from tests.unit.test_mesh import places, triples

pytestmark = pytest.mark.any_mpi


def plans(schedule, stages, micro_steps):
    return [SCHEDULES[schedule](stage, stages, micro_steps) for stage in range(stages)]


def closed_form(stage_s, micro_steps, hop_s=0.0):
    """Huang et al. 2019, Narayanan et al. 2021."""
    return (micro_steps - 1) * max(stage_s) + sum(stage_s) + 2 * (len(stage_s) - 1) * hop_s


def by_events(lists, forward_s, backward_s, hop_s):
    """When each stage is through, by a queue of events: a message comes, or a stage is free."""
    came, ends, waiting = set(), [0.0] * len(lists), [list(plan) for plan in lists]
    came |= {("forward", index, 0) for _, index in lists[0]}
    came |= {("backward", index, len(lists) - 1) for _, index in lists[0]}
    events, free = [(0.0, number, ("free", 0)) for number in range(len(lists))], [True] * len(lists)
    while events:
        now, stage, (what, number) = heapq.heappop(events)
        if what == "free":
            free[stage] = True
        else:
            came.add((what, number, stage))
        if free[stage] and waiting[stage] and (*waiting[stage][0], stage) in came:
            action, index = waiting[stage].pop(0)
            ends[stage] = now + (forward_s if action == "forward" else backward_s)[stage]
            free[stage] = False
            heapq.heappush(events, (ends[stage], stage, ("free", 0)))
            neighbour = stage + 1 if action == "forward" else stage - 1
            if 0 <= neighbour < len(lists):
                heapq.heappush(events, (ends[stage] + hop_s, neighbour, (action, index)))
    assert not any(waiting)
    return ends


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("stages", "micro_steps"), [(1, 1), (1, 5), (2, 1), (2, 8), (4, 8), (5, 3), (7, 16)])
def test_equal_stages_last_as_long_as_the_formula_says(schedule, stages, micro_steps):
    """And each waits for (p-1)/(m+p-1) of the step."""
    ends = simulate(plans(schedule, stages, micro_steps), [1.0] * stages, [2.0] * stages)
    assert ends == pytest.approx([3 * (micro_steps + stages - 1) - 2 * stage for stage in range(stages)])
    assert max(ends) == pytest.approx(closed_form([3.0] * stages, micro_steps))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_unequal_stages_as_another_simulation_has_them(schedule, seed):
    random = np.random.default_rng(seed)
    stages, micro_steps = map(int, random.integers((2, 1), (7, 20)))
    forward_s, backward_s = random.uniform(0.5, 2, (2, stages))
    lists, hop_s = plans(schedule, stages, micro_steps), random.choice([0.0, 0.3, 3.0])
    expected = by_events(lists, forward_s, backward_s, hop_s)
    assert simulate(lists, forward_s, backward_s, hop_s) == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(10))
def test_unequal_stages_of_gpipe_by_the_closed_form(seed):
    """Backwards take twice as long as forwards on each stage, so the longest sets the pace both ways."""
    random = np.random.default_rng(seed)
    tau_s, micro_steps = random.uniform(1, 3, random.integers(1, 7)), int(random.integers(1, 12))
    ends = simulate(plans("gpipe", len(tau_s), micro_steps), tau_s / 3, 2 * tau_s / 3, 0.01)
    assert max(ends) == pytest.approx(closed_form(tau_s, micro_steps, 0.01))


@pytest.mark.parametrize(("slow", "seconds"), [(0, 2 + 36), (1, 1 + 1 + 36 + 2), (2, 2 + 36 + 4)])
def test_a_slow_stage_of_1f1b_goes_on_with_other_micro_steps(slow, seconds):
    """The first makes three forwards in 6 s, and waits until 8 for the first gradient, and never again. The second
    waits 1 for its first rows and, from 5 to 6, for its first gradient; after its last the first has 2 to do."""
    forward, backward = [1.0] * 3, [2.0] * 3
    forward[slow], backward[slow] = 2.0, 4.0
    assert max(simulate(plans("1f1b", 3, 6), forward, backward)) == seconds


def test_two_unequal_stages_by_hand():
    """One micro-step: 1, a hop of 1, 3 + 4, a hop, 2. Of two, gpipe's last stage begins at 2 and waits for nothing."""
    assert simulate(plans("1f1b", 2, 1), [1, 3], [2, 4], 1) == [1 + 1 + 7 + 1 + 2, 9]
    assert simulate(plans("gpipe", 2, 2), [1, 3], [2, 4], 1) == [2 + 3 + 3 + 4 + 4 + 1 + 2, 16]


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_hops_of_a_filled_pipeline(stages):
    """gpipe's are in the way at both ends alone. 1F1B has p micro-steps under way at stage 0, each on its way for p tau
    + 2 (p-1) hop: so long do p of them take, in the middle of a step."""
    equal, hop_s = ([1.0] * stages, [2.0] * stages), 0.5
    for micro_steps in (stages, 40):
        ends = simulate(plans("gpipe", stages, micro_steps), *equal, hop_s)
        assert max(ends) == pytest.approx(closed_form([3.0] * stages, micro_steps, hop_s))
    first, later = (max(simulate(plans("1f1b", stages, m), *equal, hop_s)) for m in (10 * stages, 20 * stages))
    assert (later - first) / 10 == pytest.approx(3 * stages + 2 * (stages - 1) * hop_s)


def test_a_head_hides_in_the_bubble_or_is_waited_for():
    """Three stages of 1 + 2 s and four micro-steps: 18 s. The last stage begins at 2, the head is a quarter of it, so
    2.75 is early enough; its last backward is over at 14, and the head's part of it half a second after 12."""
    lists, equal = plans("1f1b", 3, 4), ([1.0] * 3, [2.0] * 3)
    assert simulate(lists, *equal)[0] == simulate(lists, *equal, head=Head(2.75, 0.25))[0] == 18
    assert simulate(lists, *equal, head=Head(5.0, 0.25))[0] == 18 + 2.25  # its gradient, too, comes back in time
    late = simulate(plans("gpipe", 3, 4), *equal, head=Head(7.0, 0.25))  # all forwards first: the last ends 4.25 later
    assert late[2] == 14 + 4.25
    assert late[0] == max(18 + 4.25, late[2] - 1.5 + 7)


def test_actions_that_wait_in_a_circle_are_refused():
    with pytest.raises(ValueError, match="2 actions wait for one another"):
        simulate([[("backward", 0), ("forward", 0)]], [1], [1])


def test_bytes_of_gpt2_124m_by_hand():
    """Rows of 1024 tokens and 768 channels are 3 MiB; two parts send as many for an all-reduce as they have."""
    rows, wte = 4 * 1024 * 768, 4 * 50304 * 768
    assert tensor_bytes(2, rows, 12, True, True) == (4 * 12 + 2) * rows == 157_286_400
    assert tensor_bytes(4, rows, 3, False, False) == 12 * 1.5 * rows
    assert tensor_bytes(4, rows, 3, True, False) == tensor_bytes(4, rows, 3, False, True) == 13 * 1.5 * rows
    assert tensor_bytes(1, rows, 12, True, True) == 0
    assert pipeline_bytes(4, rows, 8) == 8 * 3 * (rows + rows)
    assert pipeline_bytes(1, rows, 8) == head_bytes(1, wte) == 0
    assert head_bytes(4, wte) == 2 * wte


# Ports of 100 MB/s without headers, and 1 ms.
def seats(placement, parts, stages, rate_in=100e6):
    return Seats(Cluster(placement, rate_in, 100e6, 1e-3, nominal=False, local_rate=1e9), parts, stages)


@pytest.mark.parametrize("placement", [[0, 0, 0, 0, 1, 1, 1, 1], [0, 1] * 4, [0, 0, 1, 1, 2, 2, 2, 2]])
@pytest.mark.parametrize(("parts", "stages"), [(1, 1), (2, 1), (2, 2), (1, 4), (4, 2), (8, 1)])
def test_ranks_are_placed_as_a_run_places_them(placement, parts, stages):
    nodes = seats(placement, parts, stages).nodes
    for (part, copy, stage), node in zip(triples(placement, parts, stages), placement, strict=True):
        assert nodes[stage, copy, part] == node
    assert len(places(placement)) == nodes.size


def test_ranks_that_do_not_divide():
    with pytest.raises(ValueError, match="6 ranks for 2 shards x 2 stages, expected a multiple of 4"):
        seats([0] * 6, 2, 2)


def test_stages_that_exchange_through_a_port_share_its_rate():
    """Two nodes of four ranks: with two parts there is one stage, whose copies cross."""
    found = seats([0] * 4 + [1] * 4, 2, 1).data_cluster(0)
    assert found.placement.tolist() == [0] * 4 + [1] * 4
    assert found.rate_in.tolist() == found.rate_out.tolist() == [100e6, 100e6]
    # Two stages fill a node each: copies lie together, and nothing crosses.
    found = seats([0] * 4 + [1] * 4, 1, 2).data_cluster(1)
    assert found.placement.tolist() == [0] * 4
    assert found.rate_in.tolist() == [100e6]
    # Of three stages on two nodes the one in the middle alone crosses; with three copies on three nodes two do.
    assert seats([0, 0, 0, 1, 1, 1], 1, 3).data_cluster(1).rate_in.tolist() == [100e6, 100e6]
    assert seats([0, 0, 1, 1, 2, 2], 1, 2).data_cluster(1).rate_in.tolist() == [50e6, 100e6]
    # Two stages of two copies over four nodes: each port has one stage.
    found = seats([0, 1, 2, 3], 1, 2, rate_in=np.array([1.0, 2, 3, 4])).data_cluster(1)
    assert (found.placement.tolist(), found.rate_in.tolist()) == ([0, 1], [3, 4])


def test_a_hop_is_of_all_that_goes_through_a_port_at_once():
    rows = 10_000_000
    assert seats([0, 1], 1, 2).hop_s(rows) == pytest.approx(0.1 + 1e-3)
    assert seats([0] * 4 + [1] * 4, 1, 2).hop_s(rows) == pytest.approx(0.4 + 1e-3)  # four copies
    assert seats([0] * 4 + [1] * 4, 4, 2).hop_s(rows) == pytest.approx(0.1 + 1e-3)  # four parts of one
    assert seats([0, 0], 1, 2).hop_s(rows) == pytest.approx(0.01)  # in a node's memory
    assert seats([0, 0], 2, 1).hop_s(rows) == 0
    slow_up = seats([0, 1], 1, 2, rate_in=np.array([50e6, 100e6]))
    assert slow_up.hop_s(rows) == pytest.approx(0.2 + 1e-3)


def test_the_head_goes_from_the_first_stage_to_the_last():
    wte = 10_000_000
    assert seats([0, 1, 2], 1, 3).head_s(wte) == pytest.approx(0.1 + 1e-3)
    assert seats([0] * 4 + [1] * 4, 2, 2).head_s(wte) == pytest.approx(0.2 + 1e-3)  # two copies, each all of it
    assert seats([0, 0, 1, 1], 2, 1).head_s(wte) == 0


def test_the_port_of_a_stage_in_the_middle_has_two_neighbours():
    rows = 10_000_000
    assert seats([0, 1], 1, 2).ports_s(rows) == pytest.approx(0.1)
    assert seats([0, 1, 2], 1, 3).ports_s(rows) == pytest.approx(0.2)
    assert seats([0, 0, 1, 1], 1, 4).ports_s(rows) == pytest.approx(0.1)
    assert seats([0, 0], 1, 2).ports_s(rows) == seats([0, 1], 1, 1).ports_s(rows) == 0
