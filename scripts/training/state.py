"""What a rank updates, as a checkpoint names it: written by checkpointing.py, filled again by start.py.

mesh: a dist.mesh.Mesh where several ranks share one model; None, or one of one part and one stage, where each rank
holds it whole.
"""

from gpt2.formats.checkpoints import array_prefix, cut_facts


def state_arrays(strategy):
    """(array, start, values) of everything that this rank updates, in host memory or on its GPU."""
    for updated in strategy.state():
        yield "parameters", updated.start, updated.parameters
        for start, m, v in updated.optimizer.moments():
            yield "m", start, m
            yield "v", start, v


def is_on_gpu(array) -> bool:
    """Whether an array is CuPy's, not NumPy's."""
    return hasattr(array, "get")


def on_host(array):
    """The array itself, or a copy of what is on the GPU."""
    return array.get() if is_on_gpu(array) else array


def errors_name(rank: int, mesh=None) -> str:
    """The name of a rank's error feedback in a checkpoint; each rank has its own, as each has its own gradients."""
    return f"{prefix_of(mesh)}errors_{rank}"


def is_errors_name(array: str) -> bool:
    return "errors_" in array


def shares_model(mesh) -> bool:
    """Whether several ranks share one model."""
    return mesh is not None and mesh.tensor * mesh.pipeline > 1


def prefix_of(mesh) -> str:
    """What the names of this rank's arrays begin with in a checkpoint."""
    return array_prefix(mesh.stage, mesh.part) if shares_model(mesh) else ""


def mesh_facts(mesh, config, layers) -> dict:
    """What a run's facts say of how ranks share one model, {} if none do. layers: how many each stage has."""
    if not shares_model(mesh):
        return {}
    return {"mesh": [mesh.data, mesh.tensor, mesh.pipeline]} | cut_facts(config, layers, mesh.tensor)
