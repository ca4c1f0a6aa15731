"""Rows of a table between those who look them up and those who own them, against sums of whole tables."""

import tracemalloc
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from dist.buffers import NodeBuffers
from dist.cost.sparse_rows import Rows, node_rows_everywhere, node_rows_to_owners
from dist.cost.stages import node_traffic
from dist.host import sparse_exchange
from dist.host.sparse_exchange import AHEAD, SparseExchange, boxes, segments_bytes
from dist.progress_engine import ProgressEngine
from dist.ranges import cut_range
from tests.support.thread_ranks import run_ranks, share_memory

ROWS, WIDTH = 23, 3
SIZE = ROWS * WIDTH


@pytest.fixture(autouse=True)
def _shared_in_process(monkeypatch):
    share_memory(monkeypatch)
    monkeypatch.setattr(sparse_exchange, "SEGMENT_BYTES", 4 * WIDTH * 2)


def looked_up(rank, step=0):
    """The ids of a rank, and their gradients: some rows are several ranks', one is nobody's."""
    random = np.random.default_rng([rank, step])
    ids = np.unique(random.integers(1, ROWS, size=7 + rank)).astype("i4")
    return ids, random.standard_normal((len(ids), WIDTH)).astype("f4")


def stretches(owners, cuts):
    """The table cut where no row ends, each piece among all owners."""
    points = [0, *cuts, SIZE]
    parts = [cut_range(low, high, owners) for low, high in pairwise(points)]
    return [(part, owner) for pieces in parts for owner, part in enumerate(pieces)]


def dense(ranks, step=0):
    total = np.zeros((ROWS, WIDTH), np.float64)
    for rank in range(ranks):
        ids, values = looked_up(rank, step)
        total[ids] += values
    return total.reshape(-1)


class Ranks:
    """A rank's lookup, and the exchange among the first ranks of each node."""

    def __init__(self, world, cuts):
        self.buffers = NodeBuffers(world, SIZE)
        self.lookup, self.rank = self.buffers.new_sparse_gradient((ROWS, WIDTH), ROWS), world.rank
        rail = world.comm.Split(world.local_rank, world.node)
        self.rows = SparseExchange(rail, self.lookup, stretches(world.node_count, cuts))
        self.is_leader, self.comm = world.local_rank == 0, world.comm

    def step(self, step=0):
        self.lookup.begin(looked_up(self.rank, step)[0], looked_up(self.rank, step + 1)[0])
        self.lookup.begin_gradients()
        self.lookup.values[:] = looked_up(self.rank, step)[1]
        self.comm.Barrier()

    def run(self, exchange):
        progress = ProgressEngine()
        if self.is_leader:
            progress.start(exchange)
            progress.finish()
        self.comm.Barrier()


@pytest.mark.parametrize("nodes", [[1], [2], [1, 1], [2, 3, 1]], ids=str)
@pytest.mark.parametrize("cuts", [(), (7, 8, 40, 50)], ids=str)
def test_sums_are_those_of_whole_tables(nodes, cuts):
    def program(world):
        ranks = Ranks(world, cuts)
        found = []
        for step in range(2):
            for everywhere in (False, True):
                ranks.step(step)
                sums = np.full(SIZE, 0.5, np.float32)
                ranks.run((ranks.rows.everywhere if everywhere else ranks.rows.to_owners)(sums))
                found.append(sums - 0.5)
        return found, [np.arange(*part) for part in ranks.rows.own]

    results = run_ranks(nodes, program, most=2)
    leaders = np.cumsum([0, *nodes[:-1]])
    for index in range(4):
        expected = dense(sum(nodes), index // 2)
        for rank in leaders:
            found, own = results[rank]
            places = np.arange(SIZE) if index % 2 else np.concatenate(own)
            np.testing.assert_allclose(found[index][places], expected[places], atol=1e-5)
            rest = np.setdiff1d(np.arange(SIZE), places)
            assert not found[index][rest].any()
        assert len({results[rank][0][index].tobytes() for rank in leaders}) == 1 or not index % 2


@pytest.mark.parametrize("nodes", [[1], [1, 1], [2, 3, 1]], ids=str)
def test_rows_come_from_their_owners(nodes):
    table = np.random.default_rng(3).standard_normal(SIZE).astype("f4")

    def program(world):
        ranks = Ranks(world, (7, 8, 40, 50))
        ranks.step()
        own = np.full(SIZE, np.nan, np.float32)
        for start, stop in ranks.rows.own:
            own[start:stop] = table[start:stop]
        ranks.lookup.fetched = True
        ranks.run(ranks.rows.fetch(own, ranks.lookup.next_rows()))
        ids = looked_up(world.rank, 1)[0]
        ranks.lookup.begin(ids, ids)
        assert ranks.lookup.has_parameters
        np.testing.assert_array_equal(ranks.lookup.values, table.reshape(ROWS, WIDTH)[ids])
        ranks.comm.Barrier()

    run_ranks(nodes, program, most=2)


class Counted:
    """A communicator that counts what it sends: in float32, and in int32 but for single numbers."""

    def __init__(self, comm):
        self._comm, self.sent = comm, Counter()

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def Isend(self, array, *others):
        self.sent[array.dtype.name] += array.nbytes if array.size > 1 or array.dtype == np.float32 else 0
        return self._comm.Isend(array, *others)


@pytest.mark.parametrize("messages", [node_rows_everywhere, node_rows_to_owners])
def test_as_many_bytes_are_sent_as_the_cost_model_says(messages):
    """Of all nodes together: which owner has how many rows depends on what is looked up."""
    nodes, wanted = [2, 3, 1], [np.arange(1, 9), np.arange(5, 17), np.arange(12, 23)]

    def program(world):
        ranks = Ranks(world, (ROWS // 2 * WIDTH,))
        ranks.rows._comm = comm = Counted(ranks.rows._comm)
        ids = wanted[world.node].astype("i4")
        ranks.lookup.begin(ids, ids)
        ranks.comm.Barrier()
        flat = np.zeros(SIZE, np.float32)
        if messages is node_rows_everywhere:
            ranks.run(ranks.rows.everywhere(flat))
        else:
            ranks.run(ranks.rows.to_owners(flat))
            ranks.run(ranks.rows.fetch(flat, ranks.lookup.next_rows()))
        return sum(comm.sent.values())

    sent = sum(run_ranks(nodes, program))
    placement = np.repeat(range(3), nodes)
    predicted, _ = node_traffic(messages(placement, Rows(WIDTH, (), tuple(map(len, wanted)), 22)), placement)
    assert sent == pytest.approx(predicted.sum(), rel=0.15)  # of so few rows the parts of a node are uneven


def test_an_exchange_holds_some_segments_beside_the_rows(monkeypatch):
    count, width = 1000, 640
    monkeypatch.setattr(sparse_exchange, "SEGMENT_BYTES", 20 * 4 * width)
    ids = np.arange(count, dtype="i4")
    flats = np.zeros((2, count * width), np.float32)

    def program(world):
        lookup = NodeBuffers(world, 1).new_sparse_gradient((count, width), count)
        lookup.begin(ids, ids)
        world.comm.Barrier()
        if world.rank == 0:
            tracemalloc.start()
        world.comm.Barrier()
        rows, progress = SparseExchange(world.comm, lookup, halves), ProgressEngine()
        for exchange in (rows.everywhere(flats[world.rank]), rows.fetch(flats[world.rank], lookup.next_rows())):
            progress.start(exchange)
            progress.finish()
        world.comm.Barrier()
        return tracemalloc.get_traced_memory()[1] if world.rank == 0 else 0

    halves = [((0, count // 2 * width), 0), ((count // 2 * width, count * width), 1)]
    try:
        peak = max(run_ranks([1, 1], program))
    finally:
        tracemalloc.stop()
    copies = 4 * AHEAD * 20 * 4 * width  # of these ranks' own messages, which are threads'
    assert 0.5 * segments_bytes(count, width) < peak / 2 < segments_bytes(count, width) + copies + 20 * ids.nbytes


def test_rows_that_were_not_fetched_are_not_taken_for_those_that_were():
    def program(world):
        ranks = Ranks(world, ())
        ranks.step()
        ranks.lookup.fetched = True
        ranks.lookup.begin(np.array([1, 2], "i4"), np.array([3], "i4"))
        assert not ranks.lookup.has_parameters

    run_ranks([1], program)


@pytest.mark.parametrize(("start", "stop"), [(0, 12), (1, 2), (1, 12), (2, 4), (3, 3), (4, 11), (5, 6)])
def test_a_stretch_is_cut_into_boxes(start, stop):
    found = np.zeros((4, 3), int)
    for first, last, columns in boxes(start, stop, 3):
        found[first:last, columns] += 1
    assert found.reshape(-1).tolist() == [int(start <= element < stop) for element in range(12)]
