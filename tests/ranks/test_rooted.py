"""Rooted calls under way together: sums and parameters of any range, in pieces, behind a window; and who owns what."""

import numpy as np
import pytest

from dist.host import rooted
from dist.host.operation import new_operation
from dist.ranges import cut_by_node
from dist.wire import WireFormat

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


@pytest.mark.ranks(1, 2, 3, 4)
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
            exchange.progress.start(exchange.reduce_scatter(vector, *part))
        exchange.progress.finish()
        exact = np.sum(everyone, axis=0, dtype=np.float64)
        for part in ranges:
            own = slice(*exchange.own_part(*part))
            np.testing.assert_allclose(vector[own], exact[own], atol=1e-5 + close * comm.size)
            shared = np.full(size, np.nan, np.float32)
            shared[own] = vector[own]
            exchange.progress.start(exchange.all_gather(shared, *part))
            exchange.progress.finish()
            np.testing.assert_allclose(shared[slice(*part)], exact[slice(*part)], atol=1e-5 + close * comm.size)
            assert len(set(comm.allgather(shared.tobytes()))) == 1
        operation.close()
