"""Training over ranks that share models, made of the parts that scripts/train.py uses, and its serial counterpart."""

from dataclasses import dataclass
from functools import cache

import numpy as np

from dist.mesh import make_mesh
from dist.parts import new_parts
from dist.progress import poking
from dist.stage_links import StageLinks
from dist.world import World
from gpt2.config import GPT2Config
from gpt2.data.windows import Windows
from gpt2.kernels import load_kernels
from gpt2.model import ALONE, GPT2
from gpt2.optimizer import AdamW, AdamWSettings, clip_scale
from gpt2.parameters import Layout, Parameters, initialize
from gpt2.pieces import pieces
from gpt2.pipeline import SCHEDULES, most_in_flight
from scripts.training.borrowing import Borrowing
from scripts.training.shared_model import over_model
from scripts.training.worker import NoStageLinks, Worker
from strategies import STRATEGIES
from tests.support.jobs import host_job
from traces import Tracer

# 5 heads over 2 to 4 parts, 5 layers over 2 to 5 stages, 256 rows over 3 parts: nothing divides.
CONFIG = GPT2Config(n_layer=5, n_head=5, n_embd=15, context=8, vocab_size=131)
LENGTH, GLOBAL_BATCH, LR, MAX_NORM = 8, 12, 1e-2, 0.3
TOKENS = np.random.default_rng(5).integers(131, size=5000).astype(np.uint16)
KERNELS = load_kernels("numpy", 1)
ADAMW = AdamWSettings(eps=1e-4)  # rounding noise where the true gradient is 0 (the key bias) stays noise
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

    @property
    def layers(self) -> tuple[int, ...]:
        return LAYERS[self.stages] if self.parts == 1 or LAYERS[self.stages][-1] else (2, 2, 1)


@cache
def serial(steps: int):
    """(parameters by name, losses, norms) of one rank that takes each global batch at once, without a Worker."""
    layout, windows = Layout(CONFIG), Windows([TOKENS], LENGTH)
    parameters, gradients = Parameters.zeros(layout), Parameters.zeros(layout)
    initialize(parameters, seed=3)
    model = GPT2(KERNELS, parameters, gradients, GLOBAL_BATCH, LENGTH)
    optimizer = AdamW(KERNELS, layout, 0, layout.count, ADAMW)
    inputs, targets = np.empty((2, GLOBAL_BATCH, LENGTH), np.int32)
    losses, norms, scale = [], [], 1.0 / (GLOBAL_BATCH * LENGTH)
    for step in range(steps):
        windows.read(step * GLOBAL_BATCH, inputs, targets)
        losses.append(model.forward(inputs, targets, scale) * scale)
        model.backward(False)
        norm, factor = clip_scale(KERNELS.sum_of_squares(gradients.flat), MAX_NORM)
        norms.append(norm)
        optimizer.update(parameters.flat, gradients.flat, LR, factor)
    named = {tensor.name: parameters.view(tensor.name).reshape(tensor.whole_shape) for tensor in layout.tensors}
    return named, losses, norms


class Training:
    """One rank's part of a training by a Cut. Collective, as are `steps` and `close`."""

    def __init__(self, world: World, cut: Cut, micro_batch: int = 1):
        self.world, self.cut, self.tracer = world, cut, Tracer()
        self.mesh = make_mesh(world, cut.parts, cut.stages)
        piece = pieces(cut.layers, cut.parts)[self.mesh.stage * cut.parts + self.mesh.part]
        self.layout, kind = Layout(CONFIG, self.mesh.data_world.size, piece), STRATEGIES[cut.strategy]
        self.buffers = kind.buffers(self.mesh.data_world, self.layout.size, self.layout.held_ranges)
        borrowed = [np.zeros(self.layout.borrowed_size, np.float32) for _ in range(2)]
        self.parameters = Parameters(self.layout, self.buffers.parameters, borrowed[0])
        gradients = Parameters(self.layout, self.buffers.gradients, borrowed[1])
        if self.buffers.fills_parameters:
            initialize(self.parameters, 3, self.buffers.filled)
        world.comm.Barrier()
        micro_steps = GLOBAL_BATCH // (micro_batch * cut.copies)
        self._new_partners(micro_batch)
        strategy = kind(self._job(kind))
        parts = None if cut.parts == 1 else self.parts
        links = None if cut.stages == 1 else self.stage_links
        self.strategy = Borrowing(strategy, self.parameters, gradients, parts, links, micro_steps)
        actions = SCHEDULES[cut.schedule](self.mesh.stage, cut.stages, micro_steps)
        kernels, held = poking(KERNELS, self.strategy.poke), most_in_flight(actions)
        shape = micro_batch, LENGTH
        views = self.parameters, gradients
        self.model = GPT2(kernels, *views, *shape, self.strategy.before_use, self.parts, held)
        windows, place = Windows([TOKENS], LENGTH), (strategy.worker, strategy.workers)
        keeps = strategy.keeps_gradients
        self.worker = Worker(self.model, windows, windows, actions, *place, self.tracer, keeps, self.stage_links)
        self.steps_made = 0

    def _new_partners(self, micro_batch):
        self.parts, self.stage_links, phase = ALONE, NoStageLinks(), self.tracer.interruption
        if self.cut.parts > 1:
            self.parts = new_parts(self.mesh.parts_world, CONFIG.n_embd * max(4, micro_batch * LENGTH), phase)
        if self.cut.stages > 1:
            parts = None if self.cut.parts == 1 else self.parts
            shape = micro_batch * LENGTH, CONFIG.n_embd
            self.stage_links = StageLinks(self.mesh.stages_world, shape, phase, parts)

    def _job(self, kind):
        layout, mesh = self.layout, self.mesh
        return host_job(
            kind, world=mesh.data_world, buffers=self.buffers,
            new_optimizer=lambda start, stop: AdamW(KERNELS, layout, start, stop, ADAMW),
            sum_of_squares=KERNELS.sum_of_squares, max_norm=MAX_NORM, tracer=self.tracer,
            final_ranges=tuple(part for part in layout.final_ranges() if part[0] < part[1]),
            bucket_bytes=self.cut.bucket_bytes, over_model=over_model(mesh, self.tracer),
        )  # fmt: skip

    def steps(self, count: int) -> tuple[list[float], list[float]]:
        """(losses, norms) of the next steps, on all ranks."""
        losses, norms = [], []
        for _ in range(count):
            self.steps_made += 1
            with self.tracer.step(self.steps_made):
                loss = self.worker.gradients(self.steps_made, self.strategy.gradients_final)
                norm = self.strategy.update(LR)
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
        shapes = {tensor.name: tensor.whole_shape for tensor in Layout(CONFIG).tensors}
        copies = {}
        for copy, boxes in self.world.comm.allgather((self.mesh.copy, own)):
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
    """Every (copies, parts, stages) of so many ranks with every strategy, with and without overlap, on both schedules."""
    for parts in range(1, min(ranks, CONFIG.n_head) + 1):
        for stages in range(1, ranks // parts + 1):
            copies, rest = divmod(ranks, parts * stages)
            if rest or stages > CONFIG.n_layer + (parts == 1):
                continue
            for name in strategies or [name for name in STRATEGIES if name != "none"]:
                for schedule in schedules if stages > 1 else schedules[:1]:
                    for bucket_bytes in (None, 1000) if STRATEGIES[name].overlaps else (None,):
                        yield Cut(copies, parts, stages, name, schedule, bucket_bytes)


def largest_errors(found, reference) -> tuple[float, float, float]:
    """Of (parameters by name, losses, norms): parameters relative to the largest, losses and norms relative."""
    scale = max(np.abs(values).max() for values in reference[0].values())
    parameters = max(np.abs(found[0][name] - values).max() for name, values in reference[0].items()) / scale
    losses, norms = (np.abs(np.divide(found[k], reference[k]) - 1).max() for k in (1, 2))
    return float(parameters), float(losses), float(norms)
