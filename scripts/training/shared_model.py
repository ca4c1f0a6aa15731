"""What a rank needs to hold a piece of a model with others: its place in the mesh, its partners, what it borrows.

Where each rank has a whole model, the mesh is the world, and the rest is nothing.
"""

from collections.abc import Callable
from contextlib import closing

from dist.mesh import make_mesh
from dist.progress import poking
from dist.waiting import sum_everywhere
from dist.world import World
from gpt2.config import GPT2Config
from gpt2.model import GPT2
from gpt2.model_shards import ONE_SHARD
from gpt2.parallel_model import ParallelGPT2
from gpt2.parameters import Layout, Parameters
from scripts.backends.partners import Partners
from scripts.settings.model_parallel import ModelCut
from scripts.training.borrowing import Borrowing
from scripts.training.state import mesh_facts, shares_model
from scripts.training.worker import NoStageLinks, Server, Worker

SHARD_MULTIPLE = 16  # elements, 64 bytes: the range that a rank owns begins on a cache line
LENT_AT_ONCE = 6  # vectors of a layer that parts do not cut: both LayerNorms' and two biases


class GroupTracer:
    """A tracer for the ranks of a group (job_ranks: their numbers in the job), who number roots among themselves."""

    def __init__(self, tracer, job_ranks: tuple[int, ...]):
        self._tracer, self._job_ranks = tracer, job_ranks
        self.interruption, self.seconds = tracer.interruption, tracer.seconds

    def phase(self, name: str, bytes: int = 0, root: int | None = None):
        """As Tracer.phase."""
        return self._tracer.phase(name, bytes, None if root is None else self._job_ranks[root])

    def call(self, name: str, bytes: int, root: int):
        """As Tracer.call."""
        return self._tracer.call(name, bytes, self._job_ranks[root])


class SharedModel:
    """A rank's place among those that share a model. Collective.

    mesh: dist/mesh.py's. whole, layout: of the whole model, and of this rank's piece. stages: the stage of each rank.
    parts, stage_links: the partners, once `meet_partners` has been called. resources: closes what this opens.
    """

    def __init__(self, cut: ModelCut, config: GPT2Config, world: World, resources):
        self.cut, self._resources = cut, resources
        self.mesh = resources.enter_context(closing(make_mesh(world, cut.tensor, cut.pipeline)))
        if self.mesh.spans_nodes:
            world.print(
                "warning: parts of --tensor-parallel lie on several nodes, so every layer waits for the network: start "
                f"a multiple of {cut.tensor} ranks on each node"
            )
        shard = cut.shards[self.mesh.stage * cut.tensor + self.mesh.part]
        self.whole = Layout(config)
        self.layout = Layout(config, SHARD_MULTIPLE * self.mesh.data_world.size, shard)
        self.stages = [place["stage"] for place in self.mesh.coordinates]
        self.actions, self.in_flight = cut.actions(self.mesh.stage), cut.in_flight(self.mesh.stage)
        self.parts, self.stage_links = ONE_SHARD, NoStageLinks()

    def facts(self) -> dict:
        """What checkpoints say of how ranks share a model."""
        return mesh_facts(self.mesh, self.whole.config, self.cut.layers)

    def identity(self) -> dict:
        """What a rank's traces say of its place: nothing where it has a whole model."""
        mesh = self.mesh
        if not shares_model(mesh):
            return {}
        place = {"copy": mesh.copy, "part": mesh.part, "stage": mesh.stage}
        return place | {"mesh": [mesh.data, mesh.tensor, mesh.pipeline]}

    def group_tracer(self, tracer):
        """What a strategy times its phases with, among the ranks that hold the same piece."""
        return GroupTracer(tracer, self.mesh.data_world.job_ranks) if shares_model(self.mesh) else tracer

    def over_model(self, tracer) -> Callable[[float], float]:
        """Clipping's: the sum of squares over the pieces of a model, the same bits on all ranks that share it."""
        model_world = self.mesh.model_world

        def total(squares: float) -> float:
            with tracer.interruption("norm", bytes=8):
                return sum_everywhere(model_world.comm, squares)[0]

        return total if model_world.size > 1 else float

    def meet_partners(self, backend, rows: int, tracer) -> None:
        """Set up what parts and neighbouring stages exchange: activations of so many rows. Collective."""
        mesh, C = self.mesh, self.whole.config.n_embd
        partners = Partners(backend, tracer.interruption, self._resources)
        if mesh.tensor > 1:
            self.parts = partners.new_parts(mesh.parts_world, C * max(rows, LENT_AT_ONCE))
        if mesh.pipeline > 1:
            parts = self.parts if mesh.tensor > 1 else None
            self.stage_links = partners.new_links(mesh.stages_world, (rows, C), parts)

    def views(self, backend) -> tuple[Parameters, Parameters]:
        """Of the model's flat arrays, parameters and gradients, each with room for what the piece borrows."""
        flats, count = (backend.model.parameters, backend.model.gradients), self.layout.replicated_size
        rooms = (backend.kernels.empty((count,), flats[0].dtype) if count else None for _ in range(2))
        return tuple(Parameters(self.layout, *pair) for pair in zip(flats, rooms, strict=True))

    def new_worker(
        self, backend, strategy, batch_size: int, length: int, overlap: bool, train, val, tracer, lookup=None
    ) -> tuple:
        """(the strategy as training calls it; this rank's worker, with the model and its activations, or a Server if
        the strategy has the rank compute nothing). train, val: Windows; lookup: the model's."""
        views = self.views(backend)
        strategy = self.borrowing(strategy, backend.kernels, views)
        if strategy.worker is None:
            return strategy, Server()
        # Exchanges that overlap with compute, and messages between stages, go on between two kernels: they are poked.
        pokes = overlap or self.mesh.pipeline > 1
        kernels = poking(backend.kernels, strategy.poke) if pokes else backend.kernels
        if pokes and hasattr(kernels.device, "meanwhile"):
            kernels.device.meanwhile = strategy.poke
        if shares_model(self.mesh):
            options = {"before_use": strategy.before_use, "in_flight": self.in_flight}
            model = ParallelGPT2(kernels, *views, batch_size, length, self.parts, **options)
        else:
            model = GPT2(kernels, *views, batch_size, length, strategy.before_use, self.in_flight, lookup)
        place, keeps = (strategy.worker, strategy.workers), strategy.keeps_gradients
        return strategy, Worker(model, train, val, self.actions, *place, tracer, keeps, self.stage_links)

    def borrowing(self, strategy, kernels, views: tuple[Parameters, Parameters]):
        """The strategy as training calls it: with what the ranks of a model lend each other, if several share one."""
        if not shares_model(self.mesh):
            return strategy
        parts = self.parts if self.mesh.tensor > 1 else None
        stage_links = self.stage_links if self.mesh.pipeline > 1 else None
        return Borrowing(strategy, kernels, *views, parts, stage_links, self.cut.micro_steps)
