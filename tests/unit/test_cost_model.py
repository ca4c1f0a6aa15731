"""The cost model's seconds, by hand and against measured ones; memory of a rank."""

from dataclasses import replace

import numpy as np
import pytest

from dist.cost.messages import Setting
from dist.cost.model import TCP_HEADERS, Cluster, lower_bound_s, stage_seconds
from dist.cost.model import predict as predict_messages
from dist.cost.overlap import Overlap, Training, of_buckets
from dist.cost.stages import stage
from strategies import STRATEGIES

RATE = 50e6


def predict(strategy, *arguments):
    """What the model says of a strategy's declared messages."""
    return predict_messages(STRATEGIES[strategy].traits.messages, *arguments)


def memory_of(strategy, *arguments):
    return STRATEGIES[strategy].traits.memory.of_rank(*arguments)


def cluster(placement, rate=RATE, **others):
    return Cluster(placement, rate, rate, 0.0, **others)


def test_seconds_by_hand():
    """A ring of 4 hosts: 1.5 vectors through every port each way, 6 messages that wait for one another."""
    plain = Cluster([0, 1, 2, 3], RATE, RATE, 1e-3, nominal=False)
    assert predict("ring", plain, 8_000_000).seconds == pytest.approx(1.5 * 8e6 / RATE + 6e-3)
    links = Cluster([0, 1, 2, 3], RATE, RATE, 1e-3)
    assert predict("ring", links, 8_000_000).seconds == pytest.approx(1.5 * 8e6 / RATE * TCP_HEADERS + 6e-3)
    assert lower_bound_s(links, 8_000_000) == predict("ring", links, 8_000_000).bound_s == 1.5 * 8e6 / RATE
    assert abs(TCP_HEADERS - 1.045) < 1e-3


def test_one_slow_direction_holds_all_up():
    slow = Cluster([0, 1, 2, 3], np.array([RATE, RATE, RATE / 4, RATE]), RATE, 0.0, nominal=False)
    assert predict("ring", slow, 8_000_000).seconds == pytest.approx(1.5 * 8e6 / RATE * 4)
    assert predict("ring", slow, 8_000_000).bound_s == pytest.approx(1.5 * 8e6 / RATE * 4)


def test_a_server_takes_turns():
    """MPICH, 3 hosts, 8 MB: a fold of D, D/2 one way and then the other, D/2 collected; and then 2 D out."""
    fast_sums = cluster([0, 1, 2], nominal=False, add_rate=1e15)
    vector_s = 8e6 / RATE
    assert predict("reduce-bcast", fast_sums, 8_000_000).seconds == pytest.approx((1 + 2 * 0.5 + 0.5 + 2) * vector_s)
    rdma = cluster([0, 1, 2], nominal=False, add_rate=1e15, tcp=False)
    assert predict("reduce-bcast", rdma, 8_000_000).seconds == pytest.approx((1 + 0.5 + 0.5 + 2) * vector_s)


def test_adding_and_memory_take_time():
    """2 ranks of one node: the sum inside the node, and nothing of it on the network."""
    shared = cluster([0, 0, 1, 1], local_reduce_rate=1e8, local_rate=1e9, add_rate=1e15)
    none = cluster([0, 0, 1, 1], local_reduce_rate=1e15, local_rate=1e15, add_rate=1e15)
    more = predict("allreduce", shared, 8_000_000).seconds - predict("allreduce", none, 8_000_000).seconds
    assert more == pytest.approx(8e6 / 1e8 + 8e6 / 1e9)
    slow_sums = cluster([0, 1], add_rate=RATE / 10)
    assert predict("ring", slow_sums, 8_000_000).seconds > 4e6 / (RATE / 10)


# Seconds measured on the virtual cluster at 400 Mbit/s, MPICH, 8 MB, one rank a host: medians of 5.
MEASURED = {
    (3, "reduce-bcast"): 0.755,
    (3, "sliced-in-turn"): 0.683,
    (3, "reduce-scatter"): 0.222,
    (3, "allreduce"): 0.581,
    (4, "reduce-bcast"): 0.594,
    (4, "sliced-in-turn"): 0.630,
    (4, "reduce-scatter"): 0.249,
    (4, "allreduce"): 0.413,
    (5, "reduce-bcast"): 1.058,
    (5, "sliced-in-turn"): 0.869,
    (5, "reduce-scatter"): 0.267,
    (5, "allreduce"): 0.708,
}


@pytest.mark.parametrize("case", MEASURED, ids="{0[0]} hosts {0[1]}".format)
def test_seconds_within_15_percent_of_the_measured(case):
    hosts, strategy = case
    seconds = predict(strategy, Cluster(list(range(hosts)), RATE, RATE, 1e-4), 8_000_000).seconds
    assert seconds == pytest.approx(MEASURED[case], rel=0.15)


@pytest.mark.parametrize(("hosts", "measured_s"), [(3, 0.631), (4, 0.805), (5, 1.000)])
def test_sliced_over_open_mpis_linear_reduces(hosts, measured_s):
    """Whoever has been served begins the next call: stages one after another would be a third longer."""
    alone = Cluster(list(range(hosts)), RATE, RATE, 1e-4)
    assert predict("sliced-in-turn", alone, 8_000_000, "openmpi").seconds == pytest.approx(measured_s, rel=0.15)


def test_a_slow_port_holds_up_one_direction():
    """A ring takes as long as its slowest port's in; a leader's out counts as much."""
    slow_in = Cluster([0, 1, 2, 3], np.array([RATE, RATE, RATE / 10, RATE]), RATE, 0.0, nominal=False)
    assert predict("ring", slow_in, 8_000_000).seconds == pytest.approx(1.5 * 8e6 / (RATE / 10))
    slow_out = Cluster([0, 0, 1, 1], RATE, np.array([RATE, RATE / 5]), 0.0, nominal=False)
    assert predict("hierarchical", slow_out, 8_000_000).seconds == pytest.approx(8e6 / (RATE / 5))


def test_thousands_of_nodes():
    """Every strategy there; nobody's port carries less than the bound, and the leaders' ring no more."""
    large = Cluster(np.arange(4096 * 8) // 8, 25e9, 25e9, 3e-6)
    size = 4 * 1_500_000_000
    bound_bytes = 2 * 4095 / 4096 * size
    for strategy in (name for name, kind in STRATEGIES.items() if kind.traits.exchanges):
        prediction = predict(strategy, large, size)
        assert prediction.bytes_in.sum() == prediction.bytes_out.sum()
        assert prediction.bytes_in.max() > 0.999 * bound_bytes or strategy == "sliced-in-turn"
        assert prediction.seconds > 0.999 * prediction.bound_s
    assert predict("hierarchical", large, size).bytes_in.max() == pytest.approx(bound_bytes, rel=1e-5)


def test_the_share_that_a_rank_updates():
    """It takes that part of the time of the whole update."""
    assert memory_of("allreduce", 1000, 8, 4).updated_share(1000) == 1
    assert memory_of("sliced-in-turn", 1000, 8, 4).updated_share(1000) == 1 / 8
    assert memory_of("hierarchical", 1000, 8, 4).updated_share(1000) == 1 / 2


def test_a_sum_inside_a_node_runs_at_its_own_rate():
    """Reading, adding and writing take longer than copying."""
    one_node = Cluster([0, 0], RATE, RATE, 0.0, local_rate=5e9, local_reduce_rate=2e9)
    assert stage_seconds(stage(0, 1, 10**9), one_node) == pytest.approx(0.2)
    assert stage_seconds(stage(0, 1, 10**9, added=10**9), one_node) == pytest.approx(0.5)


def test_calls_that_stand_for_many_count_as_many():
    """sliced on 80 hosts: a few roots stand for all. Each of 80 slices is sent 79 times to its root, and 79 from it."""
    ranks, size = 80, 80 * 1024
    into = predict("sliced-in-turn", cluster(range(ranks)), size).bytes_in
    assert into.sum() == 2 * (ranks - 1) * size


def test_a_vector_is_padded_to_equal_shares():
    setting = Setting(np.array([0, 1, 2]), 10, 4, "mpich", (), 1)
    assert (setting.vector, setting.padded) == (40, 48)
    assert replace(setting, elements=12).padded == 48


def test_only_the_last_micro_steps_backward_hides_an_exchange():
    """Two thirds of a micro-step's computing."""
    for micro_steps in (1, 4):
        assert of_buckets(Training(10**9, 1.0, micro_steps=micro_steps)).beside == pytest.approx(2 / 3 / micro_steps)


def test_exposed():
    """Of an exchange of a second, a tenth of which always shows, beside half of the computing; and a part of it."""
    overlap = Overlap(part=1.0, last=0.1, beside=0.5)
    assert overlap.step_s(1.0, 0.0) == 1.0
    assert overlap.step_s(1.0, 0.8) == pytest.approx(0.8 + 0.5 + 0.1)
    assert overlap.step_s(1.0, 10.0) == pytest.approx(10.0 + 0.1)
    assert Overlap(0.5, 0.1, 0.5).step_s(1.0, 10.0) == pytest.approx(10.0 + 0.5 + 0.05)


def test_memory_of_a_rank():
    assert memory_of("allreduce", 1000, 8, 4).total == 16_000
    assert memory_of("sliced-in-turn", 1001, 8, 4).optimizer == 4 * 251  # 2/8 of 1001, rounded up
    assert memory_of("reduce-scatter", 1000, 8, 4).gradients == 4 * 1125
    memory = memory_of("zero-3", 1000, 8, 4)
    assert (memory.parameters, memory.gradients, memory.optimizer) == (500, 500, 1000)
    assert memory.formula == "1/N + 1/N + 2/N"
    assert memory_of("hierarchical-sharded", 1000, 9, 4).optimizer == 4 * 250  # 9 on 4 nodes: 2 on the smallest
