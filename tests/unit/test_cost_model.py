"""The cost model: seconds and bounds by hand and against measured ones, overlap, memory of a rank and of a node."""

import numpy as np
import pytest

from dist.cost import messages, model
from dist.cost.memory import Memory
from dist.cost.messages import Setting, message_schedule
from dist.cost.model import TCP_HEADERS, Cluster, lower_bound_s, stage_seconds
from dist.cost.mpi_choices import library_key
from dist.cost.overlap import BUCKET_BYTES, Overlap, Training, of_buckets
from dist.cost.ports import Links
from dist.cost.replay import replay_seconds
from dist.cost.stages import node_traffic, stage
from strategies import STRATEGIES

RATE, SIZE = 50e6, 8_000_000


def cluster(placement, rate_in=RATE, rate_out=RATE, latency_s=0.0, **others):
    """Ports of measured rates, where adding takes no time."""
    others = {"nominal": False, "add_rate": 1e15} | others
    return Cluster(np.array(placement), rate_in, rate_out, latency_s, **others)


def predict(strategy, cluster, size=SIZE, library="mpich"):
    """What the model says of a strategy's declared messages."""
    setting = Setting(np.asarray(cluster.placement), size // 4, library=library)
    return model.predict(STRATEGIES[strategy].traits.messages, cluster, setting)


def seconds(strategy, placement, size=SIZE, **others):
    return predict(strategy, cluster(placement, **others), size).seconds


def memory_of(strategy, *arguments):
    return STRATEGIES[strategy].traits.memory.of_rank(*arguments)


# --- seconds ---


@pytest.mark.parametrize(("ranks", "levels"), [(2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4), (16, 4), (17, 5)])
def test_a_tree_waits_for_each_level_up_and_down(ranks, levels):
    """ceil(log2 N) levels; the ring for each of its 2 (N-1) messages."""
    for strategy, steps in (("tree", 2 * levels), ("ring", 2 * (ranks - 1))):
        late, prompt = (seconds(strategy, range(ranks), latency_s=latency_s) for latency_s in (1e-3, 0.0))
        assert late - prompt == pytest.approx(steps * 1e-3)


def test_headers_stretch_what_crosses_links_of_nominal_rates():
    """A ring of 4 hosts: 1.5 vectors through every port each way."""
    assert seconds("ring", range(4)) == pytest.approx(1.5 * SIZE / RATE)
    assert seconds("ring", range(4), nominal=True) == pytest.approx(1.5 * SIZE / RATE * TCP_HEADERS)
    assert abs(TCP_HEADERS - 1.045) < 1e-3


def test_a_slow_port_holds_up_one_direction():
    """A ring takes as long as its slowest port's in; a leader's out counts as much."""
    slow_in = np.array([RATE, RATE, RATE / 10, RATE])
    assert seconds("ring", range(4), rate_in=slow_in) == pytest.approx(1.5 * SIZE / (RATE / 10))
    slow_out = np.array([RATE, RATE / 5])
    assert seconds("hierarchical", [0, 0, 1, 1], rate_out=slow_out) == pytest.approx(SIZE / (RATE / 5))


@pytest.mark.parametrize(
    ("in_s", "out_s", "expected_s"),
    [([9, 1], [1, 9], 1), ([1, 2], [1, 1], 2), ([1, 1], [3, 1], 3), ([5, 2], [3, 5], 3)],
)
def test_a_message_goes_out_of_its_sources_port_and_into_its_destinations(in_s, out_s, expected_s):
    slow = np.array([1e-6])
    links = Links(np.array([0, 1]), in_s * slow, out_s * slow, 0.0, 0.0, 0.0, 0.0, 10**9, 1e12, False)
    assert replay_seconds([stage(0, 1, 10**6)], links) == pytest.approx(expected_s)


def test_the_bound_is_of_the_slowest_direction_and_of_nodes_not_ranks():
    for rate_in, rate_out in ((RATE, RATE / 4), (RATE / 4, RATE), (np.array([RATE, RATE / 4]), RATE)):
        assert lower_bound_s(Cluster([0, 0, 0, 1], rate_in, rate_out, 1.0), SIZE) == pytest.approx(SIZE / (RATE / 4))


def test_a_server_takes_turns():
    """MPICH, 3 hosts, 8 MB: a fold of D, D/2 one way and then the other, D/2 collected; and then 2 D out."""
    vector_s = SIZE / RATE
    assert seconds("reduce-bcast", range(3)) == pytest.approx((1 + 2 * 0.5 + 0.5 + 2) * vector_s)
    assert seconds("reduce-bcast", range(3), tcp=False) == pytest.approx((1 + 0.5 + 0.5 + 2) * vector_s)


def test_adding_takes_time_where_it_is_slower_than_the_wire():
    """Around the ring (N-1)/N of the vector, whose sums then travel. In a tree two halves: a rank has two children."""
    slow = {"add_rate": RATE / 10}
    assert seconds("ring", range(4), **slow) == pytest.approx(0.75 * SIZE / (RATE / 10) + 0.75 * SIZE / RATE)
    assert seconds("tree", range(4), **slow) == pytest.approx(SIZE / (RATE / 10))


@pytest.mark.parametrize("replayed", [True, False])
def test_what_is_added_when_the_wire_is_idle_comes_on_top(replayed, monkeypatch):
    """Of two hosts each sends a half for its sum, which it adds, and then the sum."""
    monkeypatch.setattr(model, "MOST_REPLAYED", model.MOST_REPLAYED if replayed else 0)
    quick, slow = (seconds("allreduce", [0, 1], add_rate=rate, tcp=False) for rate in (1e15, 1e8))
    assert slow - quick == pytest.approx(SIZE / 2 / 1e8, rel=0.01)


def test_a_sum_inside_a_node_runs_at_its_own_rate():
    """Reading, adding and writing take longer than copying; nothing of it is on the network."""
    one_node = cluster([0, 0], local_rate=5e9, local_reduce_rate=2e9)
    assert stage_seconds(stage(0, 1, 10**9), one_node) == pytest.approx(0.2)
    assert stage_seconds(stage(0, 1, 10**9, added=10**9), one_node) == pytest.approx(0.5)
    shared, none = (
        seconds("allreduce", [0, 0, 1, 1], local_reduce_rate=sums, local_rate=copies)
        for sums, copies in ((1e8, 1e9), (1e15, 1e15))
    )
    assert shared - none == pytest.approx(SIZE / 1e8 + SIZE / 1e9)


# Seconds measured on the virtual cluster at 400 Mbit/s, 8 MB, one rank a host: medians of 5.
MEASURED = {
    (3, "mpich", "reduce-bcast"): 0.755,
    (3, "mpich", "sliced-in-turn"): 0.683,
    (3, "mpich", "reduce-scatter"): 0.222,
    (3, "mpich", "allreduce"): 0.581,
    (4, "mpich", "reduce-bcast"): 0.594,
    (4, "mpich", "sliced-in-turn"): 0.630,
    (4, "mpich", "reduce-scatter"): 0.249,
    (4, "mpich", "allreduce"): 0.413,
    (5, "mpich", "reduce-bcast"): 1.058,
    (5, "mpich", "sliced-in-turn"): 0.869,
    (5, "mpich", "reduce-scatter"): 0.267,
    (5, "mpich", "allreduce"): 0.708,
    # Over its linear reduces, whoever has been served begins the next call: stages one after another take a third more.
    (3, "openmpi", "sliced-in-turn"): 0.631,
    (4, "openmpi", "sliced-in-turn"): 0.805,
    (5, "openmpi", "sliced-in-turn"): 1.000,
}


@pytest.mark.parametrize("case", MEASURED, ids="{0[0]} hosts {0[1]} {0[2]}".format)
def test_seconds_within_15_percent_of_the_measured(case):
    hosts, library, strategy = case
    found = predict(strategy, Cluster(range(hosts), RATE, RATE, 1e-4), SIZE, library).seconds
    assert found == pytest.approx(MEASURED[case], rel=0.15)


# --- large jobs ---


def test_thousands_of_nodes():
    """Every strategy there; nobody's port carries less than the bound, and the leaders' ring no more."""
    large = Cluster(np.arange(4096 * 8) // 8, 25e9, 25e9, 3e-6)
    size = 4 * 1_500_000_000
    bound_bytes = 2 * 4095 / 4096 * size
    sums = (name for name, kind in STRATEGIES.items() if kind.traits.exchanges and kind.traits.same_weights)
    for strategy in sums:
        prediction = predict(strategy, large, size)
        assert prediction.bytes_in.sum() == prediction.bytes_out.sum()
        assert prediction.bytes_in.max() > 0.999 * bound_bytes or strategy == "sliced-in-turn"
        assert prediction.seconds > 0.999 * lower_bound_s(large, size)
    assert predict("hierarchical", large, size).bytes_in.max() == pytest.approx(bound_bytes, rel=1e-5)


@pytest.mark.parametrize("placement", [[rank // 2 for rank in range(131)], list(range(100))], ids=["2 a node", "1"])
def test_a_few_roots_stand_for_all(placement, monkeypatch):
    """The bytes of all calls together are theirs, and those of each port nearly."""

    def traffic():
        setting = Setting(np.array(placement), 10_000 * len(placement))
        return np.array(node_traffic(message_schedule(SLICED_IN_TURN, setting)[0], placement))

    few = traffic()
    monkeypatch.setattr(messages, "MOST_ROOTS", 1000)
    every = traffic()
    assert few.sum() == pytest.approx(every.sum(), rel=1e-3)
    np.testing.assert_allclose(few, every, rtol=0.1)


SLICED_IN_TURN = STRATEGIES["sliced-in-turn"].traits.messages


def test_blocks_of_a_reduce_scatter_are_alike_and_hold_all():
    """400,001 elements on 4 ranks are blocks of 100,001: each port carries 3 of them in each half."""
    found = predict("reduce-scatter", cluster(range(4)), 4 * 400_001)
    assert found.bytes_in.tolist() == found.bytes_out.tolist() == [2 * 3 * 100_001 * 4] * 4


def test_a_library_is_known_by_what_it_calls_itself():
    assert library_key("Open MPI v5.0.11, package: ...") == "openmpi"
    assert library_key("MPICH Version: 5.0.2") == "mpich"
    assert library_key("") == "mpich"


# --- overlap ---


def test_exposed():
    """Of an exchange of a second, a tenth of which always shows, beside half of the computing; and a part of it."""
    overlap = Overlap(part=1.0, last=0.1, beside=0.5)
    assert overlap.step_s(1.0, 0.0) == 1.0
    assert overlap.step_s(1.0, 0.8) == pytest.approx(0.8 + 0.5 + 0.1)
    assert overlap.step_s(1.0, 10.0) == pytest.approx(10.0 + 0.1)
    assert Overlap(0.5, 0.1, 0.5).step_s(1.0, 10.0) == pytest.approx(10.0 + 0.5 + 0.05)
    assert Overlap(part=0.5, last=0.9, beside=0.0).step_s(1.0, 0.0) == 1.0


def test_buckets_run_beside_the_last_backward():
    """Two thirds of the computing; a third of that with three micro-steps. What shows is 4 MiB, or an eighth."""
    large, small = (Training(count, 1.0, micro_steps=3) for count in (10 * BUCKET_BYTES, 1000))
    assert of_buckets(large) == Overlap(1.0, 1 / 40, 2 / 9)
    assert of_buckets(small).last == 1 / 8
    half = Training(10 * BUCKET_BYTES, 1.0, item_bytes=2)
    assert of_buckets(half).last == 1 / 20


# --- memory ---


def test_memory_of_a_rank():
    assert memory_of("allreduce", 1000, 8, 4).total == 16_000
    assert memory_of("sliced-in-turn", 1001, 8, 4).optimizer == 4 * 251  # 2/8 of 1001, rounded up
    assert memory_of("reduce-scatter", 1000, 8, 4).gradients == 4 * 1125
    memory = memory_of("zero-3", 1000, 8, 4)
    assert (memory.parameters, memory.gradients, memory.optimizer) == (500, 500, 1000)
    assert memory.formula == "1/N + 1/N + 2/N"
    assert memory_of("hierarchical-sharded", 1000, 9, 4).optimizer == 4 * 250  # 9 on 4 nodes: 2 on the smallest


def test_the_share_that_a_rank_updates():
    """It takes that part of the time of the whole update."""
    assert memory_of("allreduce", 1000, 8, 4).updated_share(1000) == 1
    assert memory_of("sliced-in-turn", 1000, 8, 4).updated_share(1000) == 1 / 8
    assert memory_of("hierarchical", 1000, 8, 4).updated_share(1000) == 1 / 2


def test_memory_of_a_node():
    """3 ranks of one of 2 nodes: parameters once where they share them, moments once where a server has them."""
    plain = Memory().of_node(100, members=3, ranks=6, nodes=2)
    assert plain == 3 * (400 + 400 + 800)
    assert Memory(shared_in_node=True).of_node(100, 3, 6, 2) == plain - 2 * 400
    assert Memory(on_server=True).of_node(100, 3, 6, 2) == plain - 2 * 800
    assert Memory().with_errors().of_node(100, 3, 6, 2) == plain + 3 * 400
    assert Memory(shared_in_node=True).with_errors().of_node(100, 3, 6, 2) == plain - 2 * 400 + 3 * 4 * 34
    assert Memory("1/N", "1 + 1/N", "2/ML").of_node(100, 3, 6, 2) == 3 * (4 * 17 + 4 * 117 + 4 * 34)
