"""Rooted calls under way together: sums and parameters of any range, in pieces, behind a window; and who owns what."""

import numpy as np
import pytest

from dist.host import rooted
from dist.host.operation import new_operation
from dist.mpi import MPI
from dist.ranges import cut_by_node
from dist.wire import WireFormat
from tests.ranks import test_overlap as small

PLACEMENTS = {
    (0,): [(0, 11)],
    (0, 0): [(0, 5), (5, 11)],
    (0, 0, 1): [(0, 2), (2, 5), (5, 11)],
    (0, 1, 0, 1, 1): [(0, 2), (5, 7), (2, 5), (7, 9), (9, 11)],
    (1, 0): [(5, 11), (0, 5)],
}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_nodes_own_alike_and_ranks_of_a_node_too(placement):
    assert cut_by_node(list(placement), 0, 11) == PLACEMENTS[placement]
    assert cut_by_node(list(placement), 100, 111) == [(low + 100, high + 100) for low, high in PLACEMENTS[placement]]


def test_pieces_begin_with_each_nodes_first_rank():
    pieces = rooted.pieces_of([0, 0, 1, 1, 2], 0, 30, 2)
    assert [root for root, _ in pieces[:5]] == [0, 2, 4, 1, 3]
    assert sorted(bounds for _, bounds in pieces)[0] == (0, 1)
    covered = np.concatenate([np.arange(*bounds) for _, bounds in pieces])
    assert sorted(covered) == [*range(30)]
    assert all(high - low <= 2 for _, (low, high) in pieces)


@pytest.mark.ranks(1, 3, 4)
def test_sums_come_to_their_owners_and_from_them_to_all(comm, monkeypatch):
    monkeypatch.setattr(rooted, "WINDOW", 3)
    for wire, close in (("float32", 0), ("bfloat16", 0.02)):
        wire_format = WireFormat(wire, 4, operation="own" if wire == "bfloat16" else "mpi")
        operation, size = new_operation(wire_format), 101
        everyone = [np.random.default_rng(rank).standard_normal(size).astype(np.float32) for rank in range(comm.size)]
        placement = [rank // 2 for rank in range(comm.size)]
        vector, ranges = everyone[comm.rank].copy(), ((60, 101), (0, 60))
        exchange = rooted.RootedExchange(comm, ranges, wire_format, placement, operation.op)
        for part in ranges:
            exchange.engine.start(exchange.reduce_scatter(vector, *part))
        exchange.engine.finish()
        exact = np.sum(everyone, axis=0, dtype=np.float64)
        for part in ranges:
            own = slice(*exchange.own_part(*part))
            np.testing.assert_allclose(vector[own], exact[own], atol=1e-5 + close * comm.size)
            shared = np.full(size, np.nan, np.float32)
            shared[own] = vector[own]
            exchange.engine.start(exchange.all_gather(shared, *part))
            exchange.engine.finish()
            np.testing.assert_allclose(shared[slice(*part)], exact[slice(*part)], atol=1e-5 + close * comm.size)
            assert len(set(comm.allgather(shared.tobytes()))) == 1
        operation.close()


def spying(comm, given):
    """The ranks of comm: `given` gets (call, root, bytes) of each Reduce and Bcast that is handed to MPI."""

    def spied(name, buffer_of):
        def call(self, *arguments, root=None):
            root = arguments[-1] if root is None else root
            given.append((name.lower().removeprefix("i"), root, buffer_of(arguments).nbytes))
            return getattr(MPI.Intracomm, name)(self, *arguments[: 3 if "educe" in name else 1], root)

        return call

    def summed(arguments):
        return arguments[1] if arguments[0] is MPI.IN_PLACE else arguments[0]

    calls = {name: spied(name, summed) for name in ("Reduce", "Ireduce")}
    calls |= {name: spied(name, lambda arguments: arguments[0]) for name in ("Bcast", "Ibcast")}
    return type("Spy", (MPI.Intracomm,), calls)(comm)


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("name", ["sliced", "sliced-in-turn"])
@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_every_step_gives_mpi_the_whole_vector_each_way(comm, name, wire):
    """Each node's ranks are roots of equally many bytes."""
    given = []
    sizes = {1: [1], 3: [1, 2]}[comm.size]
    overlap = {"bucket_bytes": 400} if name == "sliced" else {}
    training = small.Training(small.nodes_of(spying(comm, given), sizes), name, wire=wire, **overlap)
    for batch in small.TOKENS[:2]:
        training.step(batch)
    training.whole()
    vector = training.layout.size * (2 if wire == "bfloat16" else 4)
    for phase in ("reduce", "bcast"):
        assert sum(size for kind, _, size in given if kind == phase) == 2 * vector
    of_nodes = np.zeros(len(sizes))
    for kind, root, size in given:
        of_nodes[np.repeat(np.arange(len(sizes)), sizes)[root]] += size * (kind == "reduce")
    if name == "sliced":
        np.testing.assert_allclose(of_nodes, 2 * vector / len(sizes), rtol=0.1)
