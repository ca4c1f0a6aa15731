"""The exchange of activations between ranks that share a model: on GPUs, or through host memory."""

from contextlib import closing

from dist.gpu.links import LinksThroughHost
from dist.gpu.shard_sums import StreamSums, SumsThroughHost
from dist.gpu.staging import HostStaging
from dist.shard_sums import new_shard_sums
from dist.stage_links import StageLinks
from dist.world import World
from gpt2.errors import UserError


class Partners:
    """Makes the exchange for a backend of backends.py. phase: Tracer.interruption. resources: closes the partners.

    Links between pipeline stages always go through host memory. On the stream of sums and exchanges, sends and receives
    could deadlock.
    """

    def __init__(self, backend, phase, resources):
        self._backend = backend
        self._phase = phase
        self._resources = resources
        self._made = None

    def new_parts(self, shards_world: World, elements: int):
        """Set up sums of at most `elements` numbers over tensor-parallel ranks. Collective over the job."""
        comm = self._backend.new_comm(shards_world)
        if comm is not None:
            with shards_world.together(UserError):
                return StreamSums(comm, elements, self._backend.model.parameters.dtype, self._phase)
        parts = self._resources.enter_context(closing(new_shard_sums(shards_world, elements, self._phase)))
        if self._backend.device is None:
            return parts
        return SumsThroughHost(parts, self._staging(shards_world), self._phase)

    def new_links(self, stages_world: World, shape: tuple[int, ...], parts):
        """Return the links between stages, for rows of this shape. parts: from new_parts, or None. Collective."""
        if self._backend.device is None:
            return StageLinks(stages_world, shape, self._phase, parts)
        return LinksThroughHost(stages_world, shape, self._phase, self._staging(stages_world), parts)

    def _staging(self, world: World) -> HostStaging:
        """Return the host staging on separate streams, so that activations do not wait for gradients. Collective."""
        if self._made is None:
            with world.together(UserError):
                self._made = HostStaging(self._backend.device)
            self._resources.enter_context(closing(self._made))
        return self._made
