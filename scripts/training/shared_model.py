"""A rank's share of a model: its place in the mesh, its partners, and the synchronization with them.

If each rank has a whole model, the mesh is the world, and there are no partners.
"""

from collections.abc import Callable
from contextlib import closing

from dist.mesh import make_mesh
from dist.progress_engine import progressing
from dist.waiting import sum_everywhere
from dist.world import World
from gpt2.config import GPT2Config
from gpt2.model import GPT2
from gpt2.model_shards import ONE_SHARD
from gpt2.parallel_model import ParallelGPT2
from gpt2.parameters import Layout, Parameters
from scripts.backends.partners import new_partners
from scripts.settings.model_parallel import ModelCut
from scripts.training.model_sync import ModelSync
from scripts.training.state import shares_model
from scripts.training.worker import NoStageLinks, Server, Worker

SHARD_MULTIPLE = 16  # elements, 64 bytes: the range that a rank owns begins on a cache line


class GroupTracer:
    """A tracer for a group of ranks. It translates roots to ranks of the job. job_ranks: the group's job ranks."""

    def __init__(self, tracer, job_ranks: tuple[int, ...]):
        self._tracer = tracer
        self._job_ranks = job_ranks
        self.interruption = tracer.interruption
        self.seconds = tracer.seconds

    def phase(self, name: str, bytes: int = 0, root: int | None = None):
        """Trace like Tracer.phase."""
        return self._tracer.phase(name, bytes, None if root is None else self._job_ranks[root])


class SharedModel:
    """A rank's place among the ranks that share a model. Collective.

    mesh: see dist/mesh.py. whole, layout: Layout of the whole model, and of this rank's model shard. stages: the stage
    of each rank. parts, stage_links: the partners, after `meet_partners`; else None. resources: closes both.
    """

    def __init__(self, cut: ModelCut, config: GPT2Config, world: World, resources):
        self.cut = cut
        self._resources = resources
        self.mesh = resources.enter_context(closing(make_mesh(world, cut.tensor, cut.pipeline)))
        if self.mesh.spans_nodes:
            world.print(
                "warning: parts of --tensor-parallel lie on several nodes, so every layer waits for the network: start "
                f"a multiple of {cut.tensor} ranks on each node"
            )
        shard = cut.shards[self.mesh.stage * cut.tensor + self.mesh.shard]
        self.whole = Layout(config)
        self.layout = Layout(config, SHARD_MULTIPLE * self.mesh.data_world.size, shard)
        self.stages = [place["stage"] for place in self.mesh.coordinates]
        self.actions = cut.actions(self.mesh.stage)
        self.in_flight = cut.in_flight(self.mesh.stage)
        self.parts = None
        self.stage_links = None

    def identity(self) -> dict:
        """Return the facts for a rank's traces about its place; {} if it has a whole model."""
        mesh = self.mesh
        if not shares_model(mesh):
            return {}
        place = {"copy": mesh.replica, "part": mesh.shard, "stage": mesh.stage}
        return place | {"mesh": [mesh.data, mesh.tensor, mesh.pipeline]}

    def group_tracer(self, tracer):
        """Return the tracer for a strategy, which runs among the ranks that hold the same model shard."""
        return GroupTracer(tracer, self.mesh.data_world.job_ranks) if shares_model(self.mesh) else tracer

    def over_model(self, tracer) -> Callable[[float], float]:
        """Return a function that sums squares over the shards of a model, bitwise equal on its ranks (see Clipping)."""
        model_world = self.mesh.model_world

        def total(squares: float) -> float:
            with tracer.interruption("norm", bytes=8):
                return sum_everywhere(model_world.comm, squares)[0]

        return total if model_world.size > 1 else float

    def meet_partners(self, backend, rows: int, tracer) -> None:
        """Set up the exchange of activations, (rows, channels), with the ranks of the same model. Collective."""
        shape = rows, self.whole.config.n_embd
        self.parts, self.stage_links = new_partners(backend, self.mesh, shape, tracer.interruption, self._resources)

    def new_worker(
        self, backend, strategy, batch_size: int, length: int, overlap: bool, train, val, tracer, lookup=None
    ) -> tuple:
        """Return the strategy as training calls it, and this rank's Worker, or a Server if the rank computes nothing.

        train, val: Windows. lookup: the model's.
        """
        flats = (backend.model.parameters, backend.model.gradients)
        count = self.layout.replicated_size
        rooms = [backend.kernels.empty((count,), flats[0].dtype) if count else None for _ in flats]  # others' tensors
        views = [Parameters(self.layout, flat, room) for flat, room in zip(flats, rooms, strict=True)]
        if shares_model(self.mesh):
            synchronized = self.parts, self.stage_links
            strategy = ModelSync(strategy, backend.kernels, *views, *synchronized, self.cut.micro_steps)
        if strategy.worker is None:
            return strategy, Server()
        # Between two kernels, overlapped exchanges and messages between stages make progress.
        pokes = overlap or self.mesh.pipeline > 1
        kernels = progressing(backend.kernels, strategy.progress) if pokes else backend.kernels
        if pokes and hasattr(kernels.device, "meanwhile"):
            kernels.device.meanwhile = strategy.progress
        if shares_model(self.mesh):
            options = {"before_use": strategy.before_use, "in_flight": self.in_flight}
            model = ParallelGPT2(kernels, *views, batch_size, length, self.parts or ONE_SHARD, **options)
        else:
            model = GPT2(kernels, *views, batch_size, length, strategy.before_use, self.in_flight, lookup)
        place = (strategy.worker, strategy.workers)
        keeps = strategy.traits.keeps_gradients
        links = self.stage_links or NoStageLinks()
        return strategy, Worker(model, train, val, self.actions, *place, tracer, keeps, links)
