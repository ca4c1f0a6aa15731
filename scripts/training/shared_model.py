"""What a rank needs to hold a piece of a model with others: its place in the mesh, its partners, what it borrows.

Where each rank has a whole model, the mesh is the world, and the rest is nothing.
"""

from contextlib import closing
from dataclasses import dataclass

import numpy as np

from dist.mesh import Mesh, make_mesh
from dist.parts import new_parts
from dist.progress import poking
from dist.stage_links import StageLinks
from dist.waiting import sum_everywhere
from dist.world import World
from gpt2.model import ALONE, GPT2
from gpt2.parameters import Layout, Parameters
from scripts.settings import model_parallel
from scripts.training.borrowing import Borrowing
from scripts.training.worker import NoStageLinks, Server, Worker


@dataclass(frozen=True)
class Partners:
    """Of the ranks that share a model: those with other parts of this stage's tensors, and the neighbouring stages."""

    parts: object = ALONE
    stage_links: object = NoStageLinks()


SHARD_MULTIPLE = 16  # elements, 64 bytes: the range that a rank owns begins on a cache line


def new_mesh(s, config, world: World, resources) -> tuple[Mesh, Layout]:
    """Where this rank is, and the layout of its piece. Collective. s: complete settings."""
    mesh = resources.enter_context(closing(make_mesh(world, s.tensor_parallel, s.pipeline_parallel)))
    if mesh.spans_nodes:
        world.print(
            "warning: parts of --tensor-parallel lie on several nodes, and every layer waits for the network: start a "
            f"multiple of {mesh.tensor} ranks on each node"
        )
    piece = model_parallel.all_pieces(s, config)[mesh.stage * mesh.tensor + mesh.part]
    return mesh, Layout(config, SHARD_MULTIPLE * mesh.data_world.size, piece)


def identity(mesh: Mesh) -> dict:
    """What the traces say of a rank's place in the mesh: nothing where each rank has a whole model."""
    if mesh.tensor * mesh.pipeline == 1:
        return {}
    place = {"copy": mesh.copy, "part": mesh.part, "stage": mesh.stage}
    return place | {"mesh": [mesh.data, mesh.tensor, mesh.pipeline]}


def new_partners(s, config, mesh: Mesh, tracer, resources) -> Partners:
    """Collective. Their exchanges are phases of the tracer's."""
    shape, partners = (s.batch_size * s.seq_len, config.n_embd), {}
    if mesh.tensor > 1:
        room = config.n_embd * max(shape[0], 4)  # for rows, or the LayerNorms of a layer
        parts = new_parts(mesh.parts_world, room, tracer.interruption)
        partners["parts"] = resources.enter_context(closing(parts))
    if mesh.pipeline > 1:
        parts = partners.get("parts")
        partners["stage_links"] = StageLinks(mesh.stages_world, shape, tracer.interruption, parts)
    return Partners(**partners)


def over_model(mesh: Mesh, tracer):
    """Clipping's: the sum of squares of a model, of those of its pieces; the same bits on all ranks that share it."""
    if mesh.model_world.size == 1:
        return float

    def total(squares: float) -> float:
        with tracer.interruption("norm", bytes=8):
            return sum_everywhere(mesh.model_world.comm, squares)[0]

    return total


def piece_views(backend, layout: Layout) -> tuple[Parameters, Parameters]:
    """The model's parameters and gradients, each with room for what the piece borrows."""
    flats = backend.model.parameters, backend.model.gradients
    return tuple(
        Parameters(layout, flat, np.zeros(layout.borrowed_size, np.float32) if layout.borrowed else None)
        for flat in flats
    )


def borrowing(s, strategy, views: tuple[Parameters, Parameters], mesh: Mesh, partners: Partners):
    """The strategy as training calls it: with what the ranks of a model lend each other, if several share one."""
    if not model_parallel.is_cut(s):
        return strategy
    parts = partners.parts if mesh.tensor > 1 else None
    stage_links = partners.stage_links if mesh.pipeline > 1 else None
    return Borrowing(strategy, *views, parts, stage_links, s.grad_accum)


def new_worker(s, backend, views, strategy, mesh: Mesh, partners: Partners, train, val, tracer) -> Worker | Server:
    """This rank's worker, with the model and its activations; a Server if the strategy has the rank compute nothing."""
    if strategy.worker is None:
        return Server()
    # Exchanges that overlap with compute, and messages between stages, go on between two kernels: when they are poked.
    pokes = s.overlap or mesh.pipeline > 1
    kernels = poking(backend.kernels, strategy.poke) if pokes else backend.kernels
    held = model_parallel.in_flight(s, mesh.stage)
    model = GPT2(kernels, *views, s.batch_size, s.seq_len, strategy.before_use, partners.parts, held)
    place, actions = (strategy.worker, strategy.workers), model_parallel.actions(s, mesh.stage)
    return Worker(model, train, val, actions, *place, tracer, strategy.keeps_gradients, partners.stage_links)
