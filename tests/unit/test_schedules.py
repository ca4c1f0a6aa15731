"""Every strategy's messages: against a simulation that moves the data, and against port counters."""

import numpy as np
import pytest

from dist.cost.messages import Setting, message_schedule
from dist.cost.model import Cluster, stage_seconds
from dist.cost.mpi_algorithms import MpiCall, linear_reduce, pairwise_reduce_scatter
from dist.cost.mpi_choices import UnknownChoice
from dist.cost.stages import node_traffic, stage
from dist.host.host_tree import double_tree
from dist.wire import WIRE_BYTES
from strategies import STRATEGIES
from tests.support.simulated_ranks import MATRIX, MPICH_RUNS, RUNS, Ranks, depth, leaders_of, run_rabenseifner_allreduce

PLACEMENTS = {
    "2,2,2,2,1": [0, 0, 1, 1, 2, 2, 3, 3, 4],
    "2,2,2": [0, 0, 1, 1, 2, 2],
    "1,3,2": [0, 1, 1, 1, 2, 2],
    "by turns": [0, 1, 2, 0, 1, 2, 0],
    "4 of 1": [0, 1, 2, 3],
    "5 of 1": [0, 1, 2, 3, 4],
    "2 of 1": [0, 1],
    "one node": [0, 0, 0],
}


EXCHANGING = [name for name, kind in STRATEGIES.items() if kind.traits.exchanges]


def traffic(strategy, placement, size, library="mpich", item=4, own_operation=False, nodes=None):
    """(in, out) of each node's port by a strategy's declared messages. nodes: of each rank, if not its placement."""
    matrices = ((0, *MATRIX),) if size // item > MATRIX[0] * MATRIX[1] else ()
    setting = Setting(np.array(placement), size // item, item, library, own_operation=own_operation, matrices=matrices)
    stages, _ = message_schedule(STRATEGIES[strategy].traits.messages, setting)
    return node_traffic(stages, placement if nodes is None else nodes)


@pytest.mark.parametrize("size", range(1, 71))
def test_double_tree(size):
    trees = double_tree(size)
    children = [[parents.count(rank) for rank in range(size)] for parents in trees]
    for parents in trees:
        assert parents.count(None) == 1
        assert max(depth(parents, rank) for rank in range(size)) <= (size - 1).bit_length()
    for rank, (in_a, in_b) in enumerate(zip(*children, strict=True)):
        assert in_a + in_b <= 2
        if size % 2 and rank == 0:
            assert in_a == in_b == (size > 1)
        else:
            assert (in_a > 0) != (in_b > 0)


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
@pytest.mark.parametrize("strategy", RUNS)
@pytest.mark.parametrize(("elements", "wire"), [(1000, "float32"), (101, "bfloat16"), (7, "float32")])
def test_bytes_of_own_messages(strategy, placement, elements, wire):
    ranks = Ranks(placement, elements, item={"float32": 4, "bfloat16": 2}[wire])
    RUNS[strategy](ranks, elements)
    assert all(ranks.complete(rank) for rank in range(ranks.count))
    found = traffic(strategy, placement, elements * ranks.item, item=WIRE_BYTES[wire], nodes=range(ranks.count))
    np.testing.assert_array_equal(found, (ranks.into, ranks.out))


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6, 7, 8, 9, 13, 16])
@pytest.mark.parametrize("strategy", [*MPICH_RUNS, "allreduce of openmpi"])
def test_bytes_of_the_libraries_with_one_rank_a_node(strategy, count):
    """Their blocks differ by an element."""
    elements = 4 * 65520  # a multiple of each of these counts
    strategy, _, library = strategy.partition(" of ")
    ranks = Ranks(list(range(count)), elements)
    if library:
        run_rabenseifner_allreduce(ranks, ranks.placement, elements, halves=True)
    else:
        MPICH_RUNS[strategy](ranks, elements)
    assert all(ranks.complete(rank) for rank in range(count))
    found = traffic(strategy, ranks.placement, 4 * elements, library or "mpich")
    np.testing.assert_allclose(found, (ranks.into, ranks.out), rtol=1e-3)


@pytest.mark.parametrize("placement", [PLACEMENTS["2,2,2,2,1"], PLACEMENTS["1,3,2"], PLACEMENTS["by turns"]])
def test_mpich_sums_among_leaders(placement):
    """On the ports it is the leaders' algorithm; inside the nodes no port sees anything."""
    leaders = leaders_of(placement)
    ranks = Ranks(list(range(len(leaders))), 500_000)
    run_rabenseifner_allreduce(ranks, list(range(len(leaders))), 500_000)
    np.testing.assert_array_equal(traffic("allreduce", placement, 4 * 500_000), (ranks.into, ranks.out))


def test_open_mpis_root_receives_from_the_last_rank_first():
    stages = linear_reduce(MpiCall("openmpi", "reduce", np.arange(4), np.arange(4), 100, root=1))
    assert [(int(one.source[0]), int(one.destination[0])) for one in stages] == [(3, 1), (2, 1), (0, 1)]


def test_alike_rounds_of_pairwise_stand_for_each_other():
    """65 ranks, 3 a node: bytes and seconds of all 64 rounds."""
    nodes, count = np.arange(65) // 3, 65
    short = pairwise_reduce_scatter(MpiCall("mpich", "reduce_scatter_block", np.arange(count), nodes, 65_000))
    assert len(short) < 10
    into, out = np.zeros(22, int), np.zeros(22, int)
    seconds = 0.0
    one = Cluster(nodes.tolist(), 50e6, 50e6, 1e-3)
    for shift in range(1, count):
        messages = stage(np.arange(count), (np.arange(count) + shift) % count, 1000, added=1000)
        more_in, more_out = node_traffic([messages], nodes)
        into, out, seconds = into + more_in, out + more_out, seconds + stage_seconds(messages, one)
    np.testing.assert_array_equal(node_traffic(short, nodes), (into, out))
    assert sum(stage_seconds(part, one) for part in short) == pytest.approx(seconds)


# Bytes through the ports of virtual hosts, in vectors of 8 MB: (library, placement, strategy): (in, out) of each node.
COUNTED = {
    ("mpich", "2,2,2,2,1", "allreduce"): ([1.002, 2.506, 1.503, 1.503, 1.503], [1.002, 2.506, 1.503, 1.503, 1.503]),
    ("mpich", "2,2,2,2,1", "reduce-bcast"): ([3.396, 1.115, 2.339, 1.866, 1.754], [2.424, 1.892, 2.367, 1.893, 1.893]),
    ("mpich", "2,2,2,2,1", "reduce-scatter"): ([2.451] * 4 + [1.782], [2.451] * 4 + [1.782]),
    ("mpich", "2,2,2,2,1", "sliced-in-turn"): (
        [3.658, 1.376, 2.378, 2.127, 1.917], [2.685, 2.154, 2.406, 2.155, 2.056]
    ),
    ("mpich", "2,2,2,2,1", "sliced"): ([2.756, 1.004, 1.805, 1.755, 1.755], [1.806, 1.804, 1.855, 1.805, 1.805]),
    ("mpich", "2,2,2,2,1", "sliced/own"): ([1.604] * 5, [1.604] * 5),
    ("mpich", "2,2,2,2,1", "sliced-in-turn/own"): (
        [4.158, 1.376, 2.377, 1.376, 1.165], [1.934, 2.154, 2.155, 2.154, 2.055]
    ),
    ("mpich", "2,2,2,2,1", "reduce-bcast/own"): (
        [3.895, 1.115, 2.338, 1.115, 1.003], [1.673, 1.892, 2.116, 1.892, 1.892]
    ),
    ("mpich", "2,2,2,2,1", "allreduce/own"): ([1.002, 3.006, 2.004, 2.004, 2.004], [1.002, 3.006, 2.004, 2.004, 2.004]),
    ("mpich", "2,2,2", "reduce-bcast"): ([2.005, 1.002, 1.503], [2.505, 1.002, 1.003]),
    ("mpich", "2,2,2", "sliced-in-turn"): ([2.672, 1.003, 1.504], [1.839, 1.670, 1.671]),
    ("mpich", "2,2,2", "allreduce"): ([1.002, 2.004, 1.002], [1.002, 2.004, 1.002]),
    ("mpich", "5 of 1", "reduce-bcast"): ([2.507, 1.002, 2.005, 1.753, 1.753], [3.757, 1.002, 2.255, 1.003, 1.003]),
    ("mpich", "5 of 1", "sliced-in-turn"): ([2.756, 1.003, 1.805, 1.755, 1.755], [1.806, 1.804, 1.855, 1.805, 1.805]),
    ("mpich", "4 of 1", "allreduce"): ([1.503] * 4, [1.503] * 4),
    ("openmpi", "2,2,2,2,1", "allreduce"): ([2.521, 1.511, 2.011, 1.761, 1.760], [4.273, 2.012, 1.260, 1.010, 1.010]),
    ("openmpi", "2,2,2,2,1", "reduce-bcast"): (
        [3.011, 2.003, 3.005, 2.003, 1.002], [7.011, 1.003, 1.013, 1.003, 1.027]
    ),
    ("openmpi", "2,2,2,2,1", "reduce-scatter"): (
        [4.564, 1.783, 2.784, 1.783, 1.003], [2.341, 2.561, 2.562, 2.561, 1.892]
    ),
    ("openmpi", "2,2,2,2,1", "sliced"): ([2.526, 3.816, 3.788, 3.913, 1.920], [3.651, 4.682, 2.859, 2.967, 1.856]),
    ("openmpi", "2,2,2,2,1", "sliced-in-turn"): ([2.785] * 4 + [1.782], [2.785] * 4 + [1.782]),
    ("openmpi", "2,2,2", "reduce-bcast"): ([2.014, 1.508, 1.508], [3.014, 1.007, 1.007]),
    ("openmpi", "2,2,2", "allreduce"): ([2.014, 1.508, 1.507], [3.015, 1.007, 1.007]),
    ("openmpi", "2,2,2", "sliced-in-turn"): ([2.345, 1.509, 1.341], [2.012, 1.676, 1.508]),
    ("openmpi", "2,2,2", "reduce-scatter"): ([2.676, 1.505, 1.505], [2.342, 1.672, 1.672]),
    ("openmpi", "5 of 1", "reduce-bcast"): ([4.005, 1.003, 1.003, 1.003, 1.002], [1.005, 2.003, 2.003, 2.003, 1.002]),
    ("openmpi", "5 of 1", "allreduce"): ([2.506, 1.503, 1.503, 1.503, 1.503], [3.006, 1.003, 1.503, 1.503, 1.503]),
    ("openmpi", "4 of 1", "reduce-scatter"): ([3.756, 1.003, 1.003, 1.003], [1.506, 1.753, 1.753, 1.753]),
}  # fmt: skip


@pytest.mark.parametrize("case", COUNTED, ids=" ".join)
def test_bytes_on_the_ports_of_virtual_hosts(case):
    """Headers that the counters see, and barriers, are below 4 % of a vector."""
    library, placement, contender = case
    strategy, _, operation = contender.partition("/")
    into, out = traffic(strategy, PLACEMENTS[placement], 8_000_000, library, own_operation=operation == "own")
    np.testing.assert_allclose([into / 8e6, out / 8e6], COUNTED[case], atol=0.04)


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
@pytest.mark.parametrize("strategy", EXCHANGING)
@pytest.mark.parametrize("library", ["mpich", "openmpi"])
def test_what_goes_out_comes_in(strategy, placement, library):
    into, out = traffic(strategy, placement, 9_000_020, library)
    of_ranks = traffic(strategy, placement, 9_000_020, library, nodes=range(len(placement)))
    assert into.sum() == out.sum()
    assert of_ranks[0].sum() == of_ranks[1].sum()
    assert (into > 0).all() == (max(placement) > 0)


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
def test_leaders_ring_is_the_lower_bound_on_every_port(placement):
    nodes, size = max(placement) + 1, 1_000_004
    for strategy in ("hierarchical", "hierarchical-sharded"):
        for way in traffic(strategy, placement, size):
            assert np.abs(way - 2 * (nodes - 1) / nodes * size).max() < 2 * 4


def test_an_unknown_choice_says_which():
    with pytest.raises(UnknownChoice, match="openmpi's reduce_scatter_block of 64000008 bytes on 9 ranks"):
        traffic("reduce-scatter", range(9), 64_000_000, "openmpi")
