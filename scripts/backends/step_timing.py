"""What a step of a run does, with the seconds of its computing: timed on a small part of it, before anything is built.

One layer of the model stands for all of it, by floating point operations, and an update of some parameters for that of
all. All ranks are at it at once, so that they share cores and memory as they do in a step, and the slowest one counts.
That is little, and enough: what auto decides by it is how much of an exchange computing hides.
"""

import time
from dataclasses import replace

import numpy as np

from dist.cost.model import Cluster
from dist.cost.mpi_choices import UnknownChoice, library_key
from dist.cost.overlap import Timed, Training
from dist.mpi import MPI
from dist.waiting import barrier
from dist.wire import WIRE_BYTES
from dist.world import World, library_name
from gpt2.config import GPT2Config, flops_per_token
from gpt2.formats import llmc
from gpt2.model import GPT2, new_model
from gpt2.optimizer import AdamW, AdamWSettings
from gpt2.parameters import Layout
from scripts.prediction.predictor import predicted_exchange
from scripts.settings.model_parallel import is_cut
from scripts.settings.split_embedding import expected_rows
from strategies import Strategy

LAYER_FLOPS = 2e9  # of what is timed: 0.05 s of a slow core
LOADED = 8  # tokens that are computed before: compiled loops are loaded, and pages touched
LAYER_TOKENS = 128  # of its vocabulary: the head's products are counted with the others
UPDATED = 1 << 20  # parameters whose update is timed
ONE_NODE_RATE = 10e9  # no port is in the way, and the model needs a number


def timed_training(
    world: World, settings, config: GPT2Config, layout: Layout, adamw: AdamWSettings, kernels
) -> Training:
    """What each of these ranks does in a step, whose piece of the model has this layout. Collective.

    Computing is timed where there are several nodes: on one, it hides nothing. kernels: None to time nothing.
    """
    ranges = tuple(stop - start for start, stop in layout.ranges)
    rows = expected_rows(settings, config, world.size, [place["node"] for place in world.places])
    found = Training(
        layout.size, 0.0, WIRE_BYTES[settings.wire], ranges, settings.grad_accum,
        own_operation=settings.op == "own", rows=rows,
    )  # fmt: skip
    if kernels is None or world.size == 1:
        return found
    compute_s = timed_compute_s(world, settings, config, kernels) if world.node_count > 1 else 0.0
    return replace(found, compute_s=compute_s, update_s=timed_update_s(world, layout, adamw, kernels))


def timed_beside(world: World, settings, kind: type[Strategy], time_step, links: list[dict]) -> Timed | None:
    """How long this strategy's exchange is beside the computing of a step; None where it makes no use of that, or
    nothing is known. time_step(): as timed_training. Collective."""
    if not (settings.overlap and kind.all_reduces_a_part and links) or is_cut(settings):
        return None
    training = time_step()
    try:
        exchange_s = predicted_exchange(kind, cluster_of(world, links), training, library()).seconds
    except UnknownChoice:
        return None
    return Timed(exchange_s, training.compute_s, training.micro_steps)


def library() -> str:
    return library_key(library_name())


def cluster_of(world: World, links: list[dict]) -> Cluster:
    """These ranks' nodes, and their links as probe_links measured them."""
    rates = {way: [link[way] for link in links] or ONE_NODE_RATE for way in ("in", "out")}
    latency_s = max([link["latency_s"] for link in links], default=0.0)
    return Cluster([place["node"] for place in world.places], rates["in"], rates["out"], latency_s, nominal=False)


def timed_compute_s(world: World, settings, config: GPT2Config, kernels) -> float:
    """Seconds of forward and backward of a rank's micro-steps. Collective."""
    layer = replace(config, n_layer=1, vocab_size=min(config.vocab_size, LAYER_TOKENS))
    flops = flops_per_token(layer, settings.seq_len, Layout(layer).count)
    tokens = max(1, int(LAYER_FLOPS / flops))
    length = min(settings.seq_len, tokens)
    rows = min(settings.batch_size, max(1, tokens // length))
    model, inputs = new_model(layer, kernels, rows, length), np.zeros((rows, length), np.int32)
    few = GPT2(kernels, model.parameters, model.gradients, 1, min(length, LOADED))
    passes(few, inputs[:1, :LOADED])
    seconds = slowest_s(world, lambda: passes(model, inputs))
    parameters = llmc.parameter_count(config, config.padded_vocab_size)
    step_tokens = settings.batch_size * settings.grad_accum * settings.seq_len
    step_flops = step_tokens * flops_per_token(config, settings.seq_len, parameters)
    sharers = settings.tensor_parallel * settings.pipeline_parallel
    return seconds * step_flops / (rows * length * flops_per_token(layer, length, Layout(layer).count)) / sharers


def passes(model: GPT2, inputs: np.ndarray) -> None:
    """Forward and backward of a batch."""
    model.forward(inputs, inputs, 1.0 / inputs.size)
    model.backward(accumulate=False)


def timed_update_s(world: World, layout: Layout, adamw: AdamWSettings, kernels) -> float:
    """Seconds of AdamW over all that the layout holds, by one rank. Collective."""
    size = min(UPDATED, layout.size)
    optimizer = AdamW(kernels, layout, 0, size, adamw)
    parameters, gradients = np.zeros(size, np.float32), np.zeros(size, np.float32)
    optimizer.update(parameters, gradients, 0.0, 1.0)
    return slowest_s(world, lambda: optimizer.update(parameters, gradients, 0.0, 1.0)) * layout.size / size


def slowest_s(world: World, task) -> float:
    """Seconds of task() on the slowest of these ranks. Collective."""
    barrier(world.comm)
    start = time.perf_counter()
    task()
    return world.comm.allreduce(time.perf_counter() - start, MPI.MAX)
