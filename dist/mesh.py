"""The mesh of ranks: data-parallel replicas, tensor-parallel shards and pipeline stages.

Fields and trace headers call a replica "copy" and a shard "part".

The ranks of a tensor-parallel group exchange in every layer, so they are neighbours: on one node if its ranks divide by
their number. Replicas come next, and then stages, whose messages are the fewest (Narayanan et al. 2021). Neighbours
are counted node by node, whatever the launcher's order of the ranks.
"""

from dataclasses import dataclass

from dist.world import World, world_of


@dataclass(frozen=True)
class Mesh:
    """tensor, data, pipeline: how many shards, replicas and stages; part, copy, stage: this rank's.

    data_world: the ranks with the same model shard, one of each replica, in order: for strategies. model_world: the
    ranks of this replica. parts_world: the tp ranks of this stage and replica. stages_world: the stages of this tp rank
    and replica. coordinates: of every rank of the job, from `positions`. spans_nodes: whether any tensor-parallel group
    spans nodes; then every layer waits for the network.
    """

    tensor: int
    data: int
    pipeline: int
    part: int
    copy: int
    stage: int
    data_world: World
    model_world: World
    parts_world: World
    stages_world: World
    coordinates: list
    spans_nodes: bool

    def titles(self) -> list[str]:
        """Return the place of each rank of the job, "replica 0 stage 2 shard 1", without axes of size 1."""
        counts = {"copy": self.data, "stage": self.pipeline, "part": self.tensor}
        words = {"copy": "replica", "stage": "stage", "part": "shard"}
        several = [axis for axis, count in counts.items() if count > 1]
        return [" ".join(f"{words[axis]} {place[axis]}" for axis in several) for place in self.coordinates]

    def close(self) -> None:
        """Free the groups' communicators; an MPI has some two thousand per process. Collective over the job."""
        for world in (self.data_world, self.model_world, self.parts_world, self.stages_world):
            if world.whole is not None:
                world.local_comm.Free()
                world.comm.Free()


def make_mesh(world: World, tensor: int, pipeline: int) -> Mesh:
    """Make the mesh of all ranks of the job, with `tensor` shards and `pipeline` stages. Collective."""
    coordinates = positions(world.places, tensor, pipeline)
    own = coordinates[world.rank]

    def group(*axes):
        """Return the world of the ranks that differ from this one only in these axes, ordered by them."""
        fixed = [axis for axis in ("stage", "copy", "part") if axis not in axes]
        colors = sorted({tuple(place[axis] for axis in fixed) for place in coordinates})
        color = colors.index(tuple(own[axis] for axis in fixed))
        key = _position(own, tensor, world.size // (tensor * pipeline))
        return world_of(world.comm.Split(color, key), world.local_comm.Split(color, key), whole=world)

    return Mesh(
        tensor, world.size // (tensor * pipeline), pipeline, own["part"], own["copy"], own["stage"],
        # Without shards and stages the replicas are the job, and stay in its order.
        data_world=world if tensor * pipeline == 1 else group("copy"),
        model_world=group("stage", "part"),
        parts_world=group("part"),
        stages_world=group("stage"),
        coordinates=coordinates,
        spans_nodes=_spans_nodes(world.places, coordinates),
    )  # fmt: skip


def positions(places: list[dict], tensor: int, pipeline: int) -> list[dict]:
    """Return [{"rank", "copy", "part", "stage"}, ...] of every rank, by rank. places: World.places.

    ValueError if the ranks do not divide into shards and stages. Rank 0 is shard 0 of stage 0 of replica 0.
    """
    ranks, group = len(places), tensor * pipeline
    if tensor < 1 or pipeline < 1 or ranks % group:
        raise ValueError(
            f"{ranks} ranks for {tensor} shards x {pipeline} stages, expected a multiple of {group}: start as many, or "
            "ask for fewer shards or stages"
        )
    order = sorted(places, key=lambda place: (place["node"], place["local_rank"])) if group > 1 else places
    if order[0]["rank"] != 0:
        raise ValueError(
            f"rank {order[0]['rank']} is the first of the first node, expected rank 0: nodes are misnumbered"
        )
    found = [{}] * ranks
    for position, place in enumerate(order):
        part, copy, stage = position % tensor, position // tensor % (ranks // group), position // (ranks // pipeline)
        found[place["rank"]] = {"rank": place["rank"], "copy": copy, "part": part, "stage": stage}
    return found


def _position(own: dict, tensor: int, data: int) -> int:
    """Return the index of a rank in the order of `positions`."""
    return own["part"] + tensor * (own["copy"] + data * own["stage"])


def _spans_nodes(places: list[dict], coordinates: list[dict]) -> bool:
    groups = {(own["copy"], own["stage"]) for own in coordinates}
    nodes = {(own["copy"], own["stage"], place["node"]) for own, place in zip(coordinates, places, strict=True)}
    return len(nodes) > len(groups)
