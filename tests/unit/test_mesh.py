"""Which rank is which part, copy and stage."""

from itertools import product

import pytest

from dist.mesh import Mesh, positions


def places(nodes):
    """Of ranks on these nodes, as World.places has them."""
    return [
        {"rank": rank, "node": node, "host": f"host{node}", "local_rank": nodes[:rank].count(node)}
        for rank, node in enumerate(nodes)
    ]


def triples(nodes, tensor, pipeline):
    return [(own["part"], own["copy"], own["stage"]) for own in positions(places(nodes), tensor, pipeline)]


def test_parts_are_neighbours_then_copies_then_stages():
    assert triples([0] * 8, 2, 2) == [(part, copy, stage) for stage, copy, part in product(range(2), repeat=3)]
    assert triples([0] * 6, 3, 1) == [(part, copy, 0) for copy in range(2) for part in range(3)]
    assert triples([0] * 6, 1, 3) == [(0, copy, stage) for stage in range(3) for copy in range(2)]


def test_ranks_dealt_to_nodes_in_turn_are_counted_node_by_node():
    """Ranks 0, 2, 4, 6 are on the first node: two pairs of parts there, and none across."""
    assert triples([0, 1] * 4, 2, 1) == [
        (0, 0, 0),
        (0, 2, 0),
        (1, 0, 0),
        (1, 2, 0),
        (0, 1, 0),
        (0, 3, 0),
        (1, 1, 0),
        (1, 3, 0),
    ]
    assert [own["rank"] for own in positions(places([0, 1] * 4), 2, 1)] == list(range(8))


def test_without_parts_and_stages_copies_are_numbered_as_ranks():
    assert triples([0, 1, 0, 1], 1, 1) == [(0, rank, 0) for rank in range(4)]


@pytest.mark.parametrize("nodes", [[0] * 12, [0, 1, 2] * 4, [0, 0, 1, 1, 1, 0, 2, 2, 2, 0, 1, 0]])
@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 3), (3, 2), (4, 1), (1, 12), (12, 1), (2, 2)])
def test_each_place_has_one_rank(nodes, tensor, pipeline):
    found = triples(nodes, tensor, pipeline)
    assert sorted(found) == sorted(product(range(tensor), range(12 // tensor // pipeline), range(pipeline)))
    assert found[0] == (0, 0, 0)


@pytest.mark.parametrize(
    ("tensor", "pipeline", "last"), [(2, 2, "replica 1 stage 1 shard 1"), (1, 8, "stage 7"), (8, 1, "shard 7")]
)
def test_ranks_are_called_by_what_there_are_several_of(tensor, pipeline, last):
    nobody, coordinates = (None,) * 4, positions(places([0] * 8), tensor, pipeline)
    titles = Mesh(tensor, 8 // tensor // pipeline, pipeline, 0, 0, 0, *nobody, coordinates, False).titles()
    assert titles[-1] == last
    assert len(set(titles)) == 8


@pytest.mark.parametrize(("ranks", "tensor", "pipeline"), [(6, 4, 1), (6, 2, 2), (1, 2, 1), (4, 0, 1)])
def test_ranks_that_do_not_divide(ranks, tensor, pipeline):
    with pytest.raises(
        ValueError, match=f"{ranks} ranks for {tensor} shards x {pipeline} stages, expected a multiple of"
    ):
        positions(places([0] * ranks), tensor, pipeline)
