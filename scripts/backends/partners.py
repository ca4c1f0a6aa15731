"""The exchange of activations between ranks that share a model: on GPUs, or through host memory."""

from contextlib import closing

from dist.gpu.links import LinksThroughHost
from dist.gpu.shard_sums import StreamSums, SumsThroughHost
from dist.gpu.staging import HostStaging
from dist.mesh import Mesh
from dist.shard_sums import new_shard_sums
from dist.stage_links import StageLinks
from gpt2.errors import UserError

REPLICATED_VECTORS = 6  # per layer: weight and bias of both LayerNorms, and two more biases


def new_partners(backend, mesh: Mesh, shape: tuple[int, int], phase, resources) -> tuple:
    """Return the sums over tensor-parallel shards and the links between stages, each None if not needed. Collective.

    backend: of backends.py. shape: (rows, channels) of activations. phase: Tracer.interruption. resources: closes both.
    Links always use host memory: their sends and receives could deadlock on the stream that the sums use.
    """
    comm = backend.new_comm(mesh.shards_world) if mesh.tensor > 1 else None
    sums = None
    staging = None
    if backend.device is not None and ((mesh.tensor > 1 and comm is None) or mesh.pipeline > 1):
        with mesh.model_world.together(UserError):
            staging = HostStaging(backend.device)  # on separate streams: activations do not wait for gradients
        resources.enter_context(closing(staging))
    elements = shape[1] * max(shape[0], REPLICATED_VECTORS)
    if comm is not None:
        with mesh.shards_world.together(UserError):
            sums = StreamSums(comm, elements, backend.model.parameters.dtype, phase)
    elif mesh.tensor > 1:
        sums = resources.enter_context(closing(new_shard_sums(mesh.shards_world, elements, phase)))
        if staging is not None:
            sums = SumsThroughHost(sums, staging, phase)
    if mesh.pipeline == 1:
        return sums, None
    if staging is None:
        return sums, StageLinks(mesh.stages_world, shape, phase, sums)
    return sums, LinksThroughHost(mesh.stages_world, shape, phase, staging, sums)
