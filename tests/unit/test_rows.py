"""Rows of a table between those who look them up and those who own them, against sums of whole tables."""

from itertools import pairwise

import numpy as np
import pytest

from dist.buffers import NodeBuffers
from dist.host.rows import RowExchange, boxes
from dist.progress import Progress
from dist.ranges import cut_range
from tests.support.thread_ranks import run_ranks, share_memory

ROWS, WIDTH = 23, 3
SIZE = ROWS * WIDTH


@pytest.fixture(autouse=True)
def _shared_in_process(monkeypatch):
    share_memory(monkeypatch)


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
        self.lookup, self.rank = self.buffers.new_lookup((ROWS, WIDTH), ROWS), world.rank
        lane = world.comm.Split(world.local_rank, world.node)
        self.rows = RowExchange(lane, self.lookup, stretches(world.node_count, cuts))
        self.is_leader, self.comm = world.local_rank == 0, world.comm

    def step(self, step=0):
        self.lookup.begin(looked_up(self.rank, step)[0], looked_up(self.rank, step + 1)[0])
        self.lookup.begin_gradients()
        self.lookup.values[:] = looked_up(self.rank, step)[1]
        self.comm.Barrier()

    def run(self, exchange):
        progress = Progress()
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
                ranks.run(ranks.rows.everywhere() if everywhere else ranks.rows.to_owners())
                sums = np.full(SIZE, 0.5, np.float32)
                ranks.rows.add_to(lambda start, stop, sums=sums: sums[start:stop])
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
    for box in boxes(start, stop, 3):
        box.of(found.reshape(-1)[start:stop], start)[:] += 1
    assert found.reshape(-1).tolist() == [int(start <= element < stop) for element in range(12)]
