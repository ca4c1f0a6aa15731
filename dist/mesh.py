"""The mesh of ranks: data-parallel replicas, tensor-parallel shards and pipeline stages.

The ranks of a tensor-parallel group exchange in every layer, so they are neighbours: on one node if the group's size
divides the node's ranks. Replicas come next, and then stages, whose messages are the fewest (Narayanan et al. 2021).
Neighbours are counted node by node, even if the launcher orders ranks otherwise.
"""

from dataclasses import dataclass

from dist.world import World, world_of


@dataclass(frozen=True)
class Mesh:
    """tensor, data, pipeline: numbers of shards, replicas and stages; shard, replica, stage: this rank's place.

    data_world: the ranks with the same model shard, one of each replica, in order: for strategies. model_world: the
    ranks of this replica. shards_world: the tp ranks of this stage and replica. stages_world: the stages of this tp
    rank and replica. coordinates: of every rank of the job, from `positions`. spans_nodes: whether any tensor-parallel
    group spans nodes; then every layer waits for the network.
    """

    tensor: int
    data: int
    pipeline: int
    shard: int
    replica: int
    stage: int
    data_world: World
    model_world: World
    shards_world: World
    stages_world: World
    coordinates: list
    spans_nodes: bool

    def titles(self) -> list[str]:
        """Return the place of each rank of the job, "replica 0 stage 2 shard 1", without axes of size 1."""
        axes = [("replica", "copy", self.data), ("stage", "stage", self.pipeline), ("shard", "part", self.tensor)]
        several = [(word, key) for word, key, count in axes if count > 1]
        return [" ".join(f"{word} {place[key]}" for word, key in several) for place in self.coordinates]

    def close(self) -> None:
        """Free the groups' communicators: an MPI library has some two thousand per process. Collective over the job."""
        for world in (self.data_world, self.model_world, self.shards_world, self.stages_world):
            if world.whole is not None:
                world.local_comm.Free()
                world.comm.Free()


def make_mesh(world: World, tensor: int, pipeline: int) -> Mesh:
    """Make the mesh of all ranks of the job, with `tensor` shards and `pipeline` stages. Collective."""
    coordinates = positions(world.places, tensor, pipeline)
    data = world.size // (tensor * pipeline)
    own = coordinates[world.rank]
    position = own["part"] + tensor * (own["copy"] + data * own["stage"])

    def group(*axes):
        """Return the world of the ranks that differ from this one only in these axes, ordered by them."""
        fixed = [axis for axis in ("stage", "copy", "part") if axis not in axes]
        colors = sorted({tuple(place[axis] for axis in fixed) for place in coordinates})
        color = colors.index(tuple(own[axis] for axis in fixed))
        return world_of(world.comm.Split(color, position), world.local_comm.Split(color, position), whole=world)

    tensor_groups = {(place["copy"], place["stage"]) for place in coordinates}
    on_nodes = {(own["copy"], own["stage"], at["node"]) for own, at in zip(coordinates, world.places, strict=True)}
    return Mesh(
        tensor, data, pipeline, own["part"], own["copy"], own["stage"],
        # Without shards and stages the replicas are all ranks of the job, in its order.
        data_world=world if tensor * pipeline == 1 else group("copy"),
        model_world=group("stage", "part"),
        shards_world=group("part"),
        stages_world=group("stage"),
        coordinates=coordinates,
        spans_nodes=len(on_nodes) > len(tensor_groups),
    )  # fmt: skip


def positions(places: list[dict], tensor: int, pipeline: int) -> list[dict]:
    """Return [{"rank", "copy", "part", "stage"}, ...] of every rank, by rank, as in trace headers.

    places: World.places. "copy" is the replica, "part" the shard. Rank 0 is shard 0 of stage 0 of replica 0. ValueError
    if the ranks do not divide into shards and stages.
    """
    ranks = len(places)
    group = tensor * pipeline
    if tensor < 1 or pipeline < 1 or ranks % group:
        raise ValueError(
            f"{ranks} ranks for {tensor} shards x {pipeline} stages, expected a multiple of {group}: start as many, or "
            "ask for fewer shards or stages"
        )
    order = sorted(places, key=lambda place: (place["node"], place["local_rank"])) if group > 1 else places
    found = [{}] * ranks
    for position, place in enumerate(order):
        replica = position // tensor % (ranks // group)
        stage = position // (ranks // pipeline)
        found[place["rank"]] = {"rank": place["rank"], "copy": replica, "part": position % tensor, "stage": stage}
    return found
