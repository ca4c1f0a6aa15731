"""Training over ranks that share models, made of the parts that scripts/train.py uses, and its serial counterpart."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from dist.mesh import make_mesh
from dist.progress_engine import progressing
from dist.shard_sums import new_shard_sums
from dist.stage_links import StageLinks
from dist.waiting import sum_everywhere
from dist.world import World
from gpt2.config import GPT2Config
from gpt2.data.windows import Windows
from gpt2.kernels import load_kernels
from gpt2.model import GPT2
from gpt2.model_shards import ONE_SHARD, model_shards
from gpt2.optimizer import AdamW, AdamWSettings, Clipping, clip_scale
from gpt2.parallel_model import ParallelGPT2
from gpt2.parameters import Layout, Parameters, initialize
from gpt2.pipeline import SCHEDULES, most_in_flight
from scripts.training.model_sync import ModelSync
from scripts.training.worker import NoStageLinks, Worker
from strategies import STRATEGIES
from tests.support.jobs import host_job
from traces import Tracer

KERNELS = load_kernels("numpy", 1)


@dataclass(frozen=True)
class Problem:
    """What is trained: a model from the first parameters that `fill(parameters, filled)` gives, on windows."""

    config: GPT2Config
    length: int
    global_batch: int
    windows: object
    lr: float
    max_norm: float
    adamw: AdamWSettings
    fill: Callable


# 5 heads over 2 to 4 parts, 5 layers over 2 to 5 stages, 256 rows over 3 parts: nothing divides. With this eps,
# rounding noise where the true gradient is 0 (the key bias) stays noise.
CONFIG = GPT2Config(n_layer=5, n_head=5, n_embd=15, context=8, vocab_size=131)
TOKENS = np.random.default_rng(5).integers(131, size=5000).astype(np.uint16)
UNEVEN = Problem(CONFIG, 8, 12, Windows([TOKENS], 8), 1e-2, 0.3, AdamWSettings(eps=1e-4), partial(initialize, seed=3))
LAYERS = {1: (5,), 2: (3, 2), 3: (2, 3, 0), 4: (1, 2, 1, 1), 5: (1, 1, 1, 1, 1), 6: (1, 1, 1, 1, 1, 0)}


@dataclass(frozen=True)
class Cut:
    """copies x parts x stages ranks; the flags of a training on them."""

    copies: int
    parts: int
    stages: int
    strategy: str = "reduce-scatter"
    schedule: str = "1f1b"
    bucket_bytes: int | None = None
    layers: tuple[int, ...] | None = None

    @property
    def stage_layers(self) -> tuple[int, ...]:
        """Unless given: with parts the last stage has a layer, too."""
        return self.layers or (LAYERS[self.stages] if self.parts == 1 or LAYERS[self.stages][-1] else (2, 2, 1))


@cache
def serial(steps: int, problem: Problem = UNEVEN):
    """(parameters by name, losses, norms) of one rank that takes each global batch at once, without a Worker."""
    layout, batch, length = Layout(problem.config), problem.global_batch, problem.length
    parameters, gradients = Parameters.zeros(layout), Parameters.zeros(layout)
    problem.fill(parameters)
    model = GPT2(KERNELS, parameters, gradients, batch, length)
    optimizer = AdamW(KERNELS, layout, 0, layout.count, problem.adamw)
    inputs, targets = np.empty((2, batch, length), np.int32)
    losses, norms, scale = [], [], 1.0 / (batch * length)
    for step in range(steps):
        problem.windows.read(step * batch, inputs, targets)
        losses.append(model.forward(inputs, targets, scale) * scale)
        model.backward(False)
        norm, factor = clip_scale(KERNELS.sum_of_squares(gradients.flat), problem.max_norm)
        norms.append(norm)
        optimizer.update(parameters.flat, gradients.flat, problem.lr, factor)
    named = {tensor.name: parameters.view(tensor.name).reshape(tensor.whole_shape) for tensor in layout.tensors}
    return named, losses, norms


class Training:
    """One rank's part of a training by a Cut. Collective, as are `steps` and `close`."""

    def __init__(self, world: World, cut: Cut, micro_batch: int = 1, problem: Problem = UNEVEN):
        self.world, self.cut, self.problem, self.tracer = world, cut, problem, Tracer()
        self.mesh = make_mesh(world, cut.parts, cut.stages)
        shard = model_shards(cut.stage_layers, cut.parts)[self.mesh.stage * cut.parts + self.mesh.shard]
        self.layout, kind = Layout(problem.config, self.mesh.data_world.size, shard), STRATEGIES[cut.strategy]
        self.buffers = kind.traits.buffers(self.mesh.data_world, self.layout.size, self.layout.held_ranges)
        self._new_partners(micro_batch)
        views = self._filled_views()
        strategy, micro_steps = kind(self._job(kind)), problem.global_batch // (micro_batch * cut.copies)
        parts, stage_links = self.parts if cut.parts > 1 else None, self.stage_links if cut.stages > 1 else None
        self.strategy = ModelSync(strategy, KERNELS, *views, parts, stage_links, micro_steps)
        actions = SCHEDULES[cut.schedule](self.mesh.stage, cut.stages, micro_steps)
        self.model = ParallelGPT2(
            progressing(KERNELS, self.strategy.progress), *views, micro_batch, problem.length, self.parts,
            before_use=self.strategy.before_use, in_flight=most_in_flight(actions),
        )  # fmt: skip
        self.worker = Worker(
            self.model, problem.windows, problem.windows, actions, strategy.worker, strategy.workers, self.tracer,
            strategy.traits.keeps_gradients, self.stage_links,
        )  # fmt: skip
        self.steps_made = 0

    def _filled_views(self):
        borrowed = [np.zeros(self.layout.replicated_size, np.float32) for _ in range(2)]
        self.parameters = Parameters(self.layout, self.buffers.parameters, borrowed[0])
        if self.buffers.fills_parameters:
            self.problem.fill(self.parameters, filled=self.buffers.filled)
        self.world.comm.Barrier()
        return self.parameters, Parameters(self.layout, self.buffers.gradients, borrowed[1])

    def _new_partners(self, micro_batch):
        self.parts, self.stage_links, phase = ONE_SHARD, NoStageLinks(), self.tracer.interruption
        rows, C = micro_batch * self.problem.length, self.problem.config.n_embd
        if self.cut.parts > 1:
            self.parts = new_shard_sums(self.mesh.shards_world, C * rows, phase)
        if self.cut.stages > 1:
            parts = None if self.cut.parts == 1 else self.parts
            self.stage_links = StageLinks(self.mesh.stages_world, (rows, C), phase, parts)

    def _job(self, kind):
        layout, mesh, problem = self.layout, self.mesh, self.problem
        return host_job(
            kind, world=mesh.data_world, buffers=self.buffers,
            new_optimizer=lambda start, stop: AdamW(KERNELS, layout, start, stop, problem.adamw),
            sum_of_squares=KERNELS.sum_of_squares, tracer=self.tracer,
            final_ranges=tuple(part for part in layout.final_ranges() if part[0] < part[1]),
            bucket_bytes=self.cut.bucket_bytes, clipping=Clipping(problem.max_norm, over_model=self._over_model),
        )  # fmt: skip

    def _over_model(self, squares):
        return sum_everywhere(self.mesh.model_world.comm, squares)[0]

    def steps(self, count: int) -> tuple[list[float], list[float]]:
        """(losses, norms) of the next steps, on all ranks."""
        losses, norms = [], []
        for _ in range(count):
            self.steps_made += 1
            with self.tracer.step(self.steps_made):
                loss = self.worker.forward_backward(self.steps_made, self.strategy.gradients_final)
                norm = self.strategy.update(self.problem.lr)
            losses.append(self.world.comm.allreduce(loss))
            norms.append(self.world.comm.bcast(norm))
        return losses, norms

    def whole(self) -> dict[str, np.ndarray]:
        """The whole model's tensors by name, put together of the boxes of one copy's owners; equal in all copies."""
        own = {}
        for start, stop in self.layout.held_ranges:
            self.strategy.strategy.before_use(start, stop)
            for tensor in self.layout.tensors_in(start, stop):
                values = self.parameters.flat[tensor.start : tensor.stop].reshape(tensor.box_shape)
                own[tensor.name] = tensor.slices, values.copy()
        shapes = {tensor.name: tensor.whole_shape for tensor in Layout(self.problem.config).tensors}
        copies = {}
        for copy, boxes in self.world.comm.allgather((self.mesh.replica, own)):
            named = copies.setdefault(
                copy, {name: np.full(shape, np.nan, np.float32) for name, shape in shapes.items()}
            )
            for name, (slices, values) in boxes.items():
                named[name][slices] = values
        first = copies[0]
        for other in copies.values():
            assert all(np.array_equal(other[name], first[name]) for name in first), "copies differ"
        return first

    def close(self) -> None:
        for part in (self.parts, self.buffers, self.mesh):
            if hasattr(part, "close"):
                part.close()


def cuts(ranks: int, strategies=None, schedules=tuple(SCHEDULES)):
    """Every (copies, parts, stages) of so many ranks with every strategy, with and without overlap, both schedules."""
    for parts in range(1, min(ranks, CONFIG.n_head) + 1):
        for stages in range(1, ranks // parts + 1):
            copies, rest = divmod(ranks, parts * stages)
            if rest or stages > CONFIG.n_layer + (parts == 1):
                continue
            sharing = [name for name, kind in STRATEGIES.items() if kind.traits.shares_models and name != "none"]
            for name in strategies or sharing:
                for schedule in schedules if stages > 1 else schedules[:1]:
                    for bucket_bytes in (None, 1000) if STRATEGIES[name].traits.overlaps else (None,):
                        yield Cut(copies, parts, stages, name, schedule, bucket_bytes)


def largest_errors(found, reference) -> tuple[float, float, float]:
    """Of (parameters by name, losses, norms): parameters relative to the largest, losses and norms relative."""
    scale = max(np.abs(values).max() for values in reference[0].values())
    parameters = max(np.abs(found[0][name] - values).max() for name, values in reference[0].items()) / scale
    losses, norms = (np.abs(np.divide(found[k], reference[k]) - 1).max() for k in (1, 2))
    return float(parameters), float(losses), float(norms)
