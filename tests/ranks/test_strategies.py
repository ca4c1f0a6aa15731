"""Every strategy leaves every rank with the same bits, and those of one serial rank on the same global batch."""

import itertools

import numpy as np
import pytest

from dist.progress_engine import progressing
from dist.ranges import cut
from dist.world import world_of
from gpt2.config import GPT2Config
from gpt2.kernels import load_kernels
from gpt2.model import GPT2, no_hook
from gpt2.optimizer import AdamW, AdamWSettings, Clipping, clip_scale
from gpt2.parameters import Layout, Parameters, initialize
from strategies import STRATEGIES
from strategies.compatibility import worker_count
from tests.support.jobs import host_job
from traces import Tracer

CONFIG = GPT2Config(
    n_layer=1, n_head=1, n_embd=5, context=8, vocab_size=11
)  # 1055 parameters: 2, 3, 4 do not divide it
STEPS, EARLY = 6, 2
GLOBAL_BATCH, LENGTH, LR, MAX_NORM = 12, 8, 1e-2, 0.3
BATCHES = np.random.default_rng(5).integers(CONFIG.vocab_size, size=(STEPS, GLOBAL_BATCH, LENGTH + 1)).astype(np.int32)
KERNELS = load_kernels("numpy", 1)
# With this eps, rounding noise where the true gradient is 0 (the key bias) stays noise: it is not normalized to steps.
ADAMW = AdamWSettings(eps=1e-4)


def gradients_of(model, sequences, gradients_final=no_hook):
    """Loss and gradients of some sequences of the global batch, scaled as part of it."""
    scale = 1.0 / (GLOBAL_BATCH * LENGTH)
    loss = model.forward(sequences[:, :-1], sequences[:, 1:], scale) * scale
    model.backward(False, gradients_final)
    return loss


def serial(steps=STEPS):
    """Parameters (count,), losses and norms of one rank that takes the whole global batch."""
    layout = Layout(CONFIG)
    parameters, gradients = Parameters.zeros(layout), Parameters.zeros(layout)
    initialize(parameters, seed=3)
    model = GPT2(KERNELS, parameters, gradients, GLOBAL_BATCH, LENGTH)
    optimizer = AdamW(KERNELS, layout, 0, layout.count, ADAMW)
    losses, norms = [], []
    for batch in BATCHES[:steps]:
        losses.append(gradients_of(model, batch))
        norm, scale = clip_scale(KERNELS.sum_of_squares(gradients.flat), MAX_NORM)
        norms.append(norm)
        optimizer.update(parameters.flat, gradients.flat, LR, scale)
    return parameters.flat, losses, norms


def new_strategy(world, name, outlier_z=0.0, **options):
    """(strategy, parameters, gradients) on the ranks of `world`; the gradient buffer starts full of junk."""
    layout = Layout(CONFIG, multiple_of=world.size)
    buffers = STRATEGIES[name].traits.buffers(world, layout.size, layout.ranges)
    parameters, gradients = Parameters(layout, buffers.parameters), Parameters(layout, buffers.gradients)
    if buffers.fills_parameters:
        initialize(parameters, 3, buffers.filled)
    for start, stop in layout.ranges:
        gradients.flat[start : min(stop, layout.count)].fill(1e6)
    world.comm.Barrier()
    job = host_job(
        STRATEGIES[name],
        world=world, buffers=buffers, new_optimizer=lambda start, stop: AdamW(KERNELS, layout, start, stop, ADAMW),
        sum_of_squares=KERNELS.sum_of_squares, clipping=Clipping(MAX_NORM, outlier_z), tracer=Tracer(),
        final_ranges=layout.final_ranges(), **options,
    )  # fmt: skip
    return STRATEGIES[name](job), parameters, gradients


def distributed(world, name, steps=STEPS, **options):
    """The serial training over the ranks of `world`, by a strategy; and the parameters' bytes after EARLY steps."""
    comm = world.comm
    strategy, parameters, gradients = new_strategy(world, name, **options)
    assert strategy.workers == worker_count(options.get("server"), comm.size)
    if strategy.worker is not None:
        share = slice(*cut(GLOBAL_BATCH, strategy.workers)[strategy.worker])
        kernels = progressing(KERNELS, strategy.progress)
        model = GPT2(kernels, parameters, gradients, share.stop - share.start, LENGTH, strategy.before_use)
    losses, norms, early = [], [], None
    for batch in BATCHES[:steps]:
        loss = 0.0
        if strategy.worker is not None:
            loss = gradients_of(model, batch[share], strategy.gradients_final)
        norms.append(strategy.update(LR))
        losses.append(comm.allreduce(loss))
        if len(losses) == EARLY:
            early = whole(strategy, parameters).tobytes()
    flat, count = whole(strategy, parameters), parameters.layout.count
    assert not flat[count:].any(), "the pad must stay zero"
    return flat[:count], losses, norms, early


def whole(strategy, parameters):
    """All parameters (size,), also where a strategy holds a part of them and gathers the rest for each use."""
    ranges = []
    for start, stop in parameters.layout.ranges:
        strategy.before_use(start, stop)
        ranges.append(parameters.flat[start:stop].copy())
    return np.concatenate(ranges)


def cases(ranks):
    for name, strategy in STRATEGIES.items():
        if not strategy.traits.same_weights:
            continue
        if name != "none":
            yield name, {}
        if strategy.traits.overlaps:
            yield name, {"bucket_bytes": 1000}
        if strategy.traits.operations:
            yield name, {"op": "own"}
    if ranks > 1:
        yield "reduce-bcast", {"server": "dedicated"}


def placements(comm):
    """The ranks as one node, as nodes of two (the last of one, if they are odd), and as a node each."""
    for per_node in sorted({1, 2, comm.size}):
        yield world_of(comm, comm.Split(comm.rank // per_node, comm.rank))


@pytest.mark.ranks(1, 3, 4)
def test_every_strategy_is_one_serial_rank(comm):
    reference, reference_losses, reference_norms = serial()
    assert max(reference_norms) > MAX_NORM, "clipping must have been at work"
    assert comm.size == 1 or len(reference) % comm.size, "the parameter count must not divide"
    for name, options in cases(comm.size):
        for world in placements(comm) if STRATEGIES[name].traits.overlaps else [next(placements(comm))]:
            case = f"{name} {options} on {world.node_count} nodes"
            parameters, losses, norms, early = distributed(world, name, **options)
            others = comm.allgather(parameters.tobytes())
            assert others.count(others[0]) == comm.size, f"{case}: parameters differ between ranks"
            error = np.abs(parameters - reference).max() / np.abs(reference).max()
            assert error < 1e-5, f"{case}: relative error {error}"
            np.testing.assert_allclose(losses, reference_losses, rtol=1e-5, err_msg=case)
            if comm.rank == 0:
                np.testing.assert_allclose(norms, reference_norms, rtol=1e-4, err_msg=case)
            *_, again = distributed(world, name, EARLY, **options)
            assert again == early, f"{case}: a second run gives other bits"


@pytest.mark.ranks(4)
def test_rounding_on_the_wire_changes_little_and_the_same_everywhere(comm):
    """int8 loses gradients far below the largest of their block, and AdamW's steps are of one size."""
    limits = {"bfloat16": 2e-2, "int8": 1e-1}
    reference, _, _ = serial()
    for (name, kind), wire in itertools.product(STRATEGIES.items(), limits):
        traits = kind.traits
        if wire not in traits.wires or not traits.same_weights:
            continue
        more = [{"error_feedback": True}] * traits.error_feedback + [{"bucket_bytes": 1000}] * traits.overlaps
        for options in ({}, *more):
            world = world_of(comm, comm.Split(comm.rank // 2, comm.rank))
            parameters, *_ = distributed(world, name, wire=wire, **options)
            others = comm.allgather(parameters.tobytes())
            assert others.count(others[0]) == comm.size, f"{name} {options}: parameters differ between ranks"
            error = np.abs(parameters - reference).max() / np.abs(reference).max()
            assert 1e-6 < error < limits[wire], f"{name} {wire} {options}: relative error {error}"


@pytest.mark.ranks(3)
def test_none_exchanges_nothing(comm):
    """Each rank goes its own way."""
    parameters, *_ = distributed(next(placements(comm)), "none")
    assert len(set(comm.allgather(parameters.tobytes()))) == comm.size
