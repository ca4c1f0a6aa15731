"""The cost model's latencies, additions, bounds, overlap and memory, each for itself and worked out by hand."""

import numpy as np
import pytest

from dist.cost import messages, model
from dist.cost.memory import Memory
from dist.cost.messages import message_schedule
from dist.cost.model import Cluster, lower_bound_s, predict
from dist.cost.overlap import BUCKET_BYTES, Overlap, Training, of_buckets
from dist.cost.stages import node_traffic
from strategies import STRATEGIES

RATE, SIZE = 50e6, 8_000_000


def seconds(strategy, placement, latency_s=0.0, size=SIZE, **others):
    cluster = Cluster(placement, RATE, RATE, latency_s, nominal=False, **{"add_rate": 1e15} | others)
    return predict(STRATEGIES[strategy].traits.messages, cluster, size).seconds


@pytest.mark.parametrize(("ranks", "levels"), [(2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4), (16, 4), (17, 5)])
def test_a_tree_waits_for_each_level_up_and_down(ranks, levels):
    """ceil(log2 N) levels; the ring for each of its 2 (N-1) messages."""
    for strategy, steps in (("tree", 2 * levels), ("ring", 2 * (ranks - 1))):
        late, prompt = (seconds(strategy, list(range(ranks)), latency_s) for latency_s in (1e-3, 0.0))
        assert late - prompt == pytest.approx(steps * 1e-3)
        found = predict(STRATEGIES[strategy].traits.messages, Cluster(list(range(ranks)), RATE, RATE, 0.0), SIZE)
        assert found.steps == steps


def test_additions_take_time_where_they_are_slower_than_the_wire():
    """Around the ring (N-1)/N of the vector, whose sums then travel. In a tree two halves: a rank has two children."""
    slow = {"add_rate": RATE / 10}
    assert seconds("ring", list(range(4)), **slow) == pytest.approx(0.75 * SIZE / (RATE / 10) + 0.75 * SIZE / RATE)
    assert seconds("tree", list(range(4)), **slow) == pytest.approx(SIZE / (RATE / 10))


@pytest.mark.parametrize("replayed", [True, False])
def test_what_is_added_when_the_wire_is_idle_comes_on_top(replayed, monkeypatch):
    """Of two hosts each sends a half for its sum, which it adds, and then the sum."""
    monkeypatch.setattr(model, "MOST_REPLAYED", model.MOST_REPLAYED if replayed else 0)
    quick, slow = (seconds("allreduce", [0, 1], add_rate=rate, tcp=False) for rate in (1e15, 1e8))
    assert slow - quick == pytest.approx(SIZE / 2 / 1e8, rel=0.01)


def test_the_bound_is_of_the_slowest_direction_and_of_nodes_not_ranks():
    for rate_in, rate_out in ((RATE, RATE / 4), (RATE / 4, RATE), (np.array([RATE, RATE / 4]), RATE)):
        cluster = Cluster([0, 0, 0, 1], rate_in, rate_out, 1.0)
        assert lower_bound_s(cluster, SIZE) == pytest.approx(SIZE / (RATE / 4))


@pytest.mark.parametrize("placement", [[rank // 2 for rank in range(131)], list(range(100))], ids=["2 a node", "1"])
def test_a_few_roots_stand_for_all(placement, monkeypatch):
    """The bytes of all calls together are theirs, and those of each port nearly."""

    def traffic():
        stages, _ = message_schedule(STRATEGIES["sliced-in-turn"].traits.messages, placement, 40_000 * len(placement))
        steps = predict(
            STRATEGIES["sliced-in-turn"].traits.messages, Cluster(placement, RATE, RATE, 0.0), 40_000 * len(placement)
        ).steps
        return np.array(node_traffic(stages, placement)), steps

    few, few_steps = traffic()
    monkeypatch.setattr(messages, "MOST_ROOTS", 1000)
    every, steps = traffic()
    assert few_steps == pytest.approx(steps, rel=0.02)
    assert few.sum() == pytest.approx(every.sum(), rel=1e-3)
    np.testing.assert_allclose(few, every, rtol=0.1)


def test_blocks_of_a_reduce_scatter_are_alike_and_hold_all():
    """400,001 elements on 4 ranks are blocks of 100,001: each port carries 3 of them in each half."""
    stages, _ = message_schedule(STRATEGIES["reduce-scatter"].traits.messages, [0, 1, 2, 3], 4 * 400_001)
    into, out = node_traffic(stages, [0, 1, 2, 3])
    assert into.tolist() == out.tolist() == [2 * 3 * 100_001 * 4] * 4


def test_what_shows_of_an_exchange_is_never_more_than_it():
    assert Overlap(part=1.0, last=0.5, beside=0.5).step_s(1.0, 0.0) == 1.0
    assert Overlap(part=0.5, last=0.9, beside=0.0).step_s(1.0, 0.0) == 1.0


def test_buckets_run_beside_the_last_backward():
    """Two thirds of the computing; a third of that with three micro-steps. What shows is 4 MiB, or an eighth."""
    large, small = (Training(count, 1.0, micro_steps=3) for count in (10 * BUCKET_BYTES, 1000))
    assert of_buckets(large) == Overlap(1.0, 1 / 40, 2 / 9)
    assert of_buckets(small).last == 1 / 8
    half = Training(10 * BUCKET_BYTES, 1.0, item_bytes=2)
    assert of_buckets(half).last == 1 / 20


def test_memory_of_a_node():
    """3 ranks of one of 2 nodes: parameters once where they share them, moments once where a server has them."""
    plain = Memory().of_node(100, members=3, ranks=6, nodes=2)
    assert plain == 3 * (400 + 400 + 800)
    assert Memory(shared_in_node=True).of_node(100, 3, 6, 2) == plain - 2 * 400
    assert Memory(on_server=True).of_node(100, 3, 6, 2) == plain - 2 * 800
    assert Memory("1/N", "1 + 1/N", "2/ML").of_node(100, 3, 6, 2) == 3 * (4 * 17 + 4 * 117 + 4 * 34)
