"""Details of the cost model that bytes and seconds of whole exchanges hide: which port, which order, which library."""

import numpy as np
import pytest

from dist.cost.mpi_algorithms import linear_reduce, ring_rounds, scattered_bcast
from dist.cost.mpi_calls import CallGroup, MpiCall
from dist.cost.mpi_choices import library_key
from dist.cost.ports import Links
from dist.cost.replay import replay_seconds
from dist.cost.stages import stage
from scripts.prediction.predictor import advice_sentence


def call(ranks, size, **more):
    return MpiCall("openmpi", "reduce", CallGroup(np.arange(ranks), np.arange(ranks)), size, 4, **more)


@pytest.mark.parametrize(
    ("in_s", "out_s", "seconds"),
    [([9, 1], [1, 9], 1), ([1, 2], [1, 1], 2), ([1, 1], [3, 1], 3), ([5, 2], [3, 5], 3)],
)
def test_a_message_goes_out_of_its_sources_port_and_into_its_destinations(in_s, out_s, seconds):
    nodes, slow = np.array([0, 1]), np.array([1e-6])
    links = Links(nodes, in_s * slow, out_s * slow, 0.0, 0.0, 0.0, 0.0, 10**9, 1e12, False)
    assert replay_seconds([stage(0, 1, 10**6)], links) == pytest.approx(seconds)


@pytest.mark.parametrize("size", [1000, 1001, 1003])
def test_a_scattered_vector_comes_together_whole(size):
    """The last rank, which passes nothing of the scatter on, takes in each byte once."""
    stages = scattered_bcast(call(4, size), ring_rounds)
    assert sum(one.size[one.destination == 3].sum() for one in stages) == size


def test_open_mpis_root_receives_from_the_last_rank_first():
    stages = linear_reduce(call(4, 100, root=1))
    assert [(int(one.source[0]), int(one.destination[0])) for one in stages] == [(3, 1), (2, 1), (0, 1)]


def test_a_library_is_known_by_what_it_calls_itself():
    assert library_key("Open MPI v5.0.11, package: ...") == "openmpi"
    assert library_key("MPICH Version: 5.0.2") == "mpich"
    assert library_key("") == "mpich"


def row(strategy, ms, memory):
    return {"strategy": strategy, "step_s": ms / 1e3, "step_overlapped_s": None, "memory_bytes": memory,
            "times_bound": 1.5}  # fmt: skip


def test_of_steps_within_a_percent_the_one_with_the_least_memory_is_advised():
    rows = [row("ring", 100, 16), row("tree", 100.9, 8), row("sliced", 101.1, 4)]
    assert advice_sentence(rows).startswith("Take tree: its exchange is 1.50 times the lower bound, a step 101 ms")
    assert advice_sentence(rows[::2]).startswith("Take ring:")


def test_what_is_there_for_memory_is_not_advised_where_another_is_as_fast():
    rows = [row("zero-3", 100, 2), row("hierarchical-sharded", 100.5, 8), row("ring", 100.6, 16)]
    assert advice_sentence(rows).startswith("Take hierarchical-sharded:")
    assert advice_sentence([row("zero-3", 90, 2), *rows[1:]]).startswith("Take zero-3:")
