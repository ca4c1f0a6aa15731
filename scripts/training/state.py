"""The names of a rank's arrays in a checkpoint. checkpointing.py writes the arrays, start.py restores them.

mesh: a dist.mesh.Mesh. It may be None, or have one shard and one stage, if each rank holds the whole model.
"""

from gpt2.formats.checkpoints import array_prefix, cut_facts


def state_arrays(strategy):
    """Yield (array, start, values) of everything that this rank updates, in host memory or on its GPU."""
    for updated in strategy.state():
        yield "parameters", updated.start, updated.parameters
        for start, m, v in updated.optimizer.moments():
            yield "m", start, m
            yield "v", start, v
        for name, values in updated.more.items():
            yield name, updated.start, values


def on_host(array):
    """Return the array itself, or a host copy of a GPU array."""
    return array.get() if hasattr(array, "get") else array


def errors_name(rank: int, mesh=None) -> str:
    """Return the name of a rank's error feedback in a checkpoint. Each rank has different errors."""
    return f"{prefix_of(mesh)}errors_{rank}"


def shares_model(mesh) -> bool:
    """Return whether several ranks share one model."""
    return mesh is not None and mesh.tensor * mesh.pipeline > 1


def prefix_of(mesh) -> str:
    """Return the prefix of this rank's arrays in a checkpoint."""
    return array_prefix(mesh.stage, mesh.shard) if shares_model(mesh) else ""


def mesh_facts(mesh, config, layers) -> dict:
    """Return how ranks share a model, for checkpoints; {} if they do not. layers: the number in each stage."""
    if not shares_model(mesh):
        return {}
    return {"mesh": [mesh.data, mesh.tensor, mesh.pipeline]} | cut_facts(config, layers, mesh.tensor)
