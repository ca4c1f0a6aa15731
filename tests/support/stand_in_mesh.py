"""What a dist.mesh.Mesh tells of a rank, made of a world in rank order: for tests of who uses one."""

from types import SimpleNamespace

from dist.world import world_of


def mesh_of(world, tensor: int, pipeline: int):
    """tensor parts x as many copies as there are ranks for x pipeline stages, in this order. Collective."""
    copies = world.size // (tensor * pipeline)
    part, copy, stage = world.rank % tensor, world.rank // tensor % copies, world.rank // (tensor * copies)

    def group(color):
        comm = world.comm.Split(color, world.rank)
        return world_of(comm, comm.Split(0, comm.rank))

    return SimpleNamespace(
        tensor=tensor, data=copies, pipeline=pipeline, shard=part, replica=copy, stage=stage,
        data_world=group(stage * tensor + part), model_world=group(copy),
    )  # fmt: skip
