"""Estimate a rank's compute time per step before anything is built.

One layer is timed and scaled by floating-point operations; an update of some parameters is scaled by their number. All
ranks measure at the same time, because they share cores and memory in a step, and the slowest rank counts. This is
precise enough to tell how much of an exchange compute can hide (--strategy auto).
"""

import time
from dataclasses import replace

import numpy as np

from dist.cost.model import Cluster
from dist.cost.mpi_choices import library_key
from dist.cost.overlap import Training
from dist.mpi import MPI
from dist.waiting import barrier
from dist.wire import WIRE_BYTES
from dist.world import World, library_name
from gpt2.config import GPT2Config, flops_per_token
from gpt2.formats import llmc
from gpt2.model import GPT2, new_model
from gpt2.optimizer import AdamW, AdamWSettings
from gpt2.parameters import Layout
from scripts.prediction.predictor import ONE_NODE_RATE
from scripts.settings.split_embedding import expected_rows

LAYER_FLOPS = 2e9  # of the timed layer: 0.05 s on a slow core
WARM_UP_TOKENS = 8  # computed before timing, to load compiled loops and touch pages
LAYER_VOCABULARY = 128  # small, as only the layer is timed, not the head
UPDATED = 1 << 20  # parameters whose update is timed


def timed_training(
    world: World, settings, config: GPT2Config, layout: Layout, adamw: AdamWSettings, kernels
) -> Training:
    """Describe and time the work of these ranks in a step. Collective. layout: of their model shard.

    Forward and backward are timed only on several nodes: on one node they hide nothing. kernels: None to time nothing.
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


def library() -> str:
    return library_key(library_name())


def cluster_of(world: World, links: list[dict]) -> Cluster:
    """Return the nodes of these ranks with the links that probe_links measured."""
    rates = {way: [link[way] for link in links] or ONE_NODE_RATE for way in ("in", "out")}
    latency_s = max([link["latency_s"] for link in links], default=0.0)
    return Cluster([place["node"] for place in world.places], rates["in"], rates["out"], latency_s, nominal=False)


def timed_compute_s(world: World, settings, config: GPT2Config, kernels) -> float:
    """Estimate the seconds of forward and backward of a rank's microbatches. Collective."""
    layer = replace(config, n_layer=1, vocab_size=min(config.vocab_size, LAYER_VOCABULARY))
    flops = flops_per_token(layer, settings.seq_len, Layout(layer).count)
    tokens = max(1, int(LAYER_FLOPS / flops))
    length = min(settings.seq_len, tokens)
    rows = min(settings.batch_size, max(1, tokens // length))
    model = new_model(layer, kernels, rows, length)
    inputs = np.zeros((rows, length), np.int32)
    few = GPT2(kernels, model.parameters, model.gradients, 1, min(length, WARM_UP_TOKENS))
    passes(few, inputs[:1, :WARM_UP_TOKENS])
    seconds = slowest_s(world, lambda: passes(model, inputs))
    parameters = llmc.parameter_count(config, config.padded_vocab_size)
    step_tokens = settings.batch_size * settings.grad_accum * settings.seq_len
    step_flops = step_tokens * flops_per_token(config, settings.seq_len, parameters)
    sharers = settings.tensor_parallel * settings.pipeline_parallel
    return seconds * step_flops / (rows * length * flops_per_token(layer, length, Layout(layer).count)) / sharers


def passes(model: GPT2, inputs: np.ndarray) -> None:
    """Compute forward and backward of a batch."""
    model.forward(inputs, inputs, 1.0 / inputs.size)
    model.backward(accumulate=False)


def timed_update_s(world: World, layout: Layout, adamw: AdamWSettings, kernels) -> float:
    """Estimate the seconds of AdamW over all parameters of the layout, on one rank. Collective."""
    size = min(UPDATED, layout.size)
    optimizer = AdamW(kernels, layout, 0, size, adamw)
    parameters = np.zeros(size, np.float32)
    gradients = np.zeros(size, np.float32)
    optimizer.update(parameters, gradients, 0.0, 1.0)
    return slowest_s(world, lambda: optimizer.update(parameters, gradients, 0.0, 1.0)) * layout.size / size


def slowest_s(world: World, task) -> float:
    """Return the seconds of task() on the slowest of these ranks. Collective."""
    barrier(world.comm)
    start = time.perf_counter()
    task()
    return world.comm.allreduce(time.perf_counter() - start, MPI.MAX)
