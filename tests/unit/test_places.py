"""Who sits where, from what the ranks tell each other."""

from types import SimpleNamespace

import pytest

from dist.world import world_of

# Of five ranks on three hosts: (the first rank of its node, host, local rank, rank in the job).
TOLD = [(0, "a", 0, 0), (1, "b", 0, 2), (0, "a", 1, 4), (3, "c", 0, 6), (1, "b", 1, 8)]


@pytest.mark.parametrize("rank", range(5))
def test_nodes_are_numbered_without_gaps_in_the_order_of_their_first_ranks(rank):
    leader, host, local_rank, _ = TOLD[rank]
    comm = SimpleNamespace(rank=rank, size=5, allgather=lambda own: TOLD)
    members = [first for first, *_ in TOLD].count(leader)
    local_comm = SimpleNamespace(rank=local_rank, size=members, bcast=lambda own: leader)
    world = world_of(comm, local_comm)
    assert [place["node"] for place in world.places] == [0, 1, 0, 2, 1]
    assert [place["rank"] for place in world.places] == list(range(5))
    assert world.job_ranks == (0, 2, 4, 6, 8)
    assert (world.node, world.node_count) == ([0, 1, 0, 2, 1][rank], 3)
    assert (world.host, world.local_rank, world.local_size) == (host, local_rank, members)
