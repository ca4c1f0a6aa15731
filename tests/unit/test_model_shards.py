"""Pieces of a model: who holds what, the first parameters, and one model computed in pieces against the whole one."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from gpt2.activations import activation_bytes
from gpt2.config import GPT2Config
from gpt2.kernels import load_kernels
from gpt2.model import new_model
from gpt2.model_shards import ONE_SHARD, model_shards
from gpt2.parallel_model import ParallelGPT2
from gpt2.parameters import Layout, Parameters, initialize
from gpt2.pipeline import SCHEDULES, bubble, layers_by_flops, most_in_flight

CONFIG = GPT2Config(n_layer=5, n_head=5, n_embd=15, context=8, vocab_size=131)  # nothing divides; the pad is 125 rows
CUTS = [
    ((5,), 1),
    ((5,), 2),
    ((5,), 3),
    ((2, 3), 1),
    ((1, 4, 0), 1),
    ((1, 1, 1, 1, 1, 0), 1),
    ((3, 2), 5),
    ((1, 2, 2), 2),
]


class ThreadedParts:
    """Sums over parts that are threads of one process: an independent form of dist/shard_sums.py."""

    def __init__(self, parts: int):
        self.barrier, self.rows = threading.Barrier(parts), [None] * parts

    def of(self, part: int):
        def combine(rows, reduce):
            self.rows[part] = rows.copy()
            self.barrier.wait(60)
            result = reduce(self.rows)
            self.barrier.wait(60)
            rows[:] = result
            return rows

        return SimpleNamespace(
            room=lambda shape: None,
            sum=lambda rows: combine(rows, lambda all_rows: np.sum(all_rows, axis=0)),
            maximum=lambda rows: combine(rows, lambda all_rows: np.max(all_rows, axis=0)),
        )


def layouts(layers, parts, multiple_of=1):
    return [Layout(CONFIG, multiple_of, shard) for shard in model_shards(layers, parts)]


@pytest.mark.parametrize(("layers", "parts"), CUTS)
def test_each_parameter_has_one_owner(layers, parts):
    owners = {tensor.name: np.zeros(tensor.whole_shape, int) for tensor in Layout(CONFIG).tensors}
    for layout in layouts(layers, parts):
        for tensor in layout.tensors:
            owners[tensor.name][tensor.slices] += 1
    assert all((count == 1).all() for count in owners.values())
    assert sum(layout.count for layout in layouts(layers, parts)) == Layout(CONFIG).count


@pytest.mark.parametrize(("layers", "parts"), CUTS)
def test_ranges_tile_the_buffer_in_both_directions(layers, parts):
    for layout in layouts(layers, parts, multiple_of=16):
        shard = layout.shard
        assert len(layout.ranges) == shard.is_first + shard.stop_layer - shard.first_layer + shard.is_last
        ends = [0, *(stop for _, stop in layout.ranges)]
        assert [start for start, _ in layout.ranges] == ends[:-1]
        assert ends[-1] == layout.size
        final = layout.final_ranges()
        assert [stop for _, stop in final] == [layout.size, *(start for start, _ in final[:-1])]
        assert final[-1][0] == 0


@pytest.mark.parametrize(("layers", "parts"), CUTS)
def test_a_piece_begins_with_the_bits_of_the_whole_model(layers, parts):
    whole = Parameters.zeros(Layout(CONFIG))
    initialize(whole, seed=7)
    for layout in layouts(layers, parts, multiple_of=16):
        parameters, filled = Parameters.zeros(layout), []
        parameters.flat.fill(9.0)
        initialize(parameters, 7, lambda *part, filled=filled: filled.append(part))
        assert tuple(filled) == layout.held_ranges
        for tensor in layout.tensors:
            expected = whole.view(tensor.name).reshape(tensor.whole_shape)[tensor.slices]
            assert np.array_equal(parameters.view(tensor.name).reshape(tensor.box_shape), expected), tensor.name
        assert (parameters.flat[layout.count :] == 0).all()


DEEP = GPT2Config(n_layer=8, n_head=2, n_embd=64, context=32, vocab_size=200)


@pytest.fixture(scope="module")
def parameters():
    made = Parameters.zeros(Layout(DEEP, multiple_of=1024))
    made.flat.fill(7.0)  # what lay there before must not show
    initialize(made, seed=3)
    return made


def test_matrices_are_drawn_with_their_deviation(parameters):
    """0.02, and what ends a residual branch divided by the root of the branches, two a layer."""
    for layer in parameters.layers:
        for name in ("qkv_weight", "fc_weight"):
            assert np.std(getattr(layer, name)) == pytest.approx(0.02, rel=0.05)
        for name in ("attproj_weight", "fcproj_weight"):
            assert np.std(getattr(layer, name)) == pytest.approx(0.02 / math.sqrt(2 * DEEP.n_layer), rel=0.05)
    assert np.std(parameters.wte[: DEEP.vocab_size]) == pytest.approx(0.02, rel=0.05)
    assert np.std(parameters.wpe) == pytest.approx(0.02, rel=0.05)


def test_the_rest_begins_at_one_or_nothing(parameters):
    for layer in parameters.layers:
        assert (layer.ln1_weight == 1).all()
        assert (layer.ln2_weight == 1).all()
        for name in ("ln1_bias", "qkv_bias", "attproj_bias", "ln2_bias", "fc_bias", "fcproj_bias"):
            assert not getattr(layer, name).any()
    assert (parameters.lnf_weight == 1).all()
    assert not parameters.lnf_bias.any()
    assert not parameters.wte[DEEP.vocab_size :].any()
    assert not parameters.flat[parameters.layout.count :].any()


@pytest.mark.parametrize(("layers", "parts"), CUTS)
def test_pieces_compute_the_whole_models_losses_and_gradients(layers, parts):
    """Two micro-steps through all stages and parts, with what is borrowed copied by name."""
    kernels, batches = load_kernels("numpy", 1), np.random.default_rng(3).integers(131, size=(2, 2, 9)).astype(np.int32)
    whole = new_model(CONFIG, kernels, 2, 8)
    initialize(whole.parameters, 7)
    rng = np.random.default_rng(4)
    for tensor in whole.parameters.layout.tensors:  # biases and LayerNorms that are not 0 and 1 show what is lost
        whole.parameters.view(tensor.name)[:] += 0.1 * rng.standard_normal(tensor.shape).astype(np.float32)
    whole.parameters.wte[131:] = 0.0
    losses = []
    for index, batch in enumerate(batches):
        losses.append(whole.forward(batch[:, :-1].copy(), batch[:, 1:].copy(), 1 / 32))
        whole.backward(index > 0)
    models, found = in_pieces(layers, parts, whole.parameters, kernels), []
    for index, batch in enumerate(batches):
        found.append(through_all_stages(models, batch, index))
    assert np.allclose(found, losses, rtol=1e-6)
    for tensor in whole.parameters.layout.tensors:
        expected = whole.gradients.view(tensor.name).reshape(tensor.whole_shape)
        for stage in models:
            for model in stage:
                own = model.gradients.layout.by_name.get(tensor.name)
                if own and tensor.name != "wte":
                    assert_close(model.gradients.view(own.name).reshape(own.box_shape), expected[own.slices])
    for part in range(parts):  # the embedding's gradient has two halves, unless one stage has both
        halves = [models[stage][part].gradients.wte for stage in sorted({0, len(layers) - 1})]
        assert_close(sum(halves), whole.gradients.wte[models[0][part].gradients.layout.by_name["wte"].slices])


def assert_close(found, expected):
    assert np.abs(found - expected).max(initial=0) <= 1e-6 * max(1.0, np.abs(expected).max(initial=0))


def in_pieces(layers, parts, whole, kernels):
    """[stage][part]: models with the whole one's parameters, and room for two batches."""
    models = []
    for stage in range(len(layers)):
        threaded, row = ThreadedParts(parts), []
        for shard in model_shards(layers, parts)[stage * parts : (stage + 1) * parts]:
            layout = Layout(CONFIG, 1, shard)
            parameters, gradients = Parameters.zeros(layout), Parameters.zeros(layout)
            gradients.flat.fill(7.0)  # what the step before has left
            for tensors, buffer in ((layout.tensors, parameters.flat), (layout.replicated, parameters.replicated)):
                for tensor in tensors:
                    values = whole.view(tensor.name).reshape(tensor.whole_shape)[tensor.slices]
                    buffer[tensor.start : tensor.stop] = values.reshape(-1)
            group = threaded.of(shard.tp_rank) if parts > 1 else ONE_SHARD
            row.append(ParallelGPT2(kernels, parameters, gradients, 2, 8, group, in_flight=2))
        models.append(row)
    return models


def through_all_stages(models, batch, index) -> float:
    """The loss of a batch, with forward and backward through all stages; each part in a thread of its own."""
    inputs, targets, losses = batch[:, :-1].copy(), batch[:, 1:].copy(), {}

    def forward(stage, part):
        model = models[stage][part]
        if stage:
            model.inputs(index)[:] = models[stage - 1][part].outputs
        losses[stage, part] = model.forward(inputs, targets, 1 / 32, index)

    def backward(stage, part):
        model = models[stage][part]
        if stage < len(models) - 1:
            model.dresidual[:] = models[stage + 1][part].dresidual
        model.backward(index > 0, slot=index)

    for stage in range(len(models)):
        in_threads(forward, stage, len(models[stage]))
    for stage in reversed(range(len(models))):
        in_threads(backward, stage, len(models[stage]))
    last = [losses[len(models) - 1, part] for part in range(len(models[0]))]
    assert len(set(last)) == 1  # all parts have all losses
    return last[0]


def in_threads(work, stage, parts):
    with ThreadPoolExecutor(parts) as pool:
        list(pool.map(partial(work, stage), range(parts)))


@pytest.mark.parametrize(("layers", "parts"), CUTS)
@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize(("dtype", "operand_bytes"), [("float32", 4), ("bfloat16", 2)])
def test_activations_are_counted(layers, parts, in_flight, dtype, operand_bytes):
    kernels, counted = load_kernels("numpy", 1, dtype=dtype), []

    def empty(shape, dtype):
        array = np.empty(shape, dtype)
        counted.append(array.nbytes)
        return array

    counting = SimpleNamespace(**vars(kernels) | {"empty": empty})
    shared = SimpleNamespace(room=np.zeros)
    for shard in model_shards(layers, parts):
        layout = Layout(CONFIG, 1, shard)
        counted.clear()
        parameters = Parameters.zeros(layout)
        group = shared if parts > 1 else ONE_SHARD
        model = ParallelGPT2(counting, parameters, parameters, 2, 5, group, in_flight=in_flight)
        assert {layer.ln1.out.itemsize for layer in model.kept[0].layers} <= {operand_bytes}
        assert sum(counted) == activation_bytes(CONFIG, 2, 5, shard, in_flight, operand_bytes)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_never_wait_in_a_circle(schedule):
    """Stages that make their actions in order, each when its input is there, come to the end, after the bubble."""
    for stages in range(1, 9):
        for micro_steps in range(1, 17):
            plans = [list(SCHEDULES[schedule](stage, stages, micro_steps)) for stage in range(stages)]
            held = [most_in_flight(plan) for plan in plans]
            ends, at = {}, [0] * stages
            while any(plans):
                moved = False
                for stage, plan in enumerate(plans):
                    if plan:
                        action, index = plan[0]
                        needs = ("forward", index, stage - 1) if action == "forward" else ("backward", index, stage + 1)
                        begun = ends.get(needs, 0 if not 0 <= needs[2] < stages else None)
                        if action == "backward":
                            assert ("forward", index, stage) in ends
                        if begun is not None:
                            plan.pop(0)
                            at[stage] = ends[action, index, stage] = max(at[stage], begun) + 1
                            moved = True
                assert moved, "a circle"
            assert max(at) == 2 * (micro_steps + stages - 1)
            idle = 1 - 2 * micro_steps / max(at)
            assert idle == pytest.approx(bubble(stages, micro_steps))
            most = [min(micro_steps, stages - stage) for stage in range(stages)]
            assert held == (most if schedule == "1f1b" else [micro_steps] * stages)


def test_one_stage_makes_plain_micro_steps():
    assert SCHEDULES["1f1b"](0, 1, 2) == [("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1)]


def test_layers_are_shared_out_by_their_operations():
    gpt2 = GPT2Config(12, 12, 768, 1024, 50257)
    assert layers_by_flops(gpt2, 4, 1024) == (4, 4, 4, 0)
    assert layers_by_flops(gpt2, 4, 1024, least_last=1) == (3, 4, 4, 1)
    assert layers_by_flops(gpt2, 1, 1024) == (12,)
    for stages in range(1, 14):
        *others, last = layers_by_flops(gpt2, stages, 64)
        assert sum(others) + last == 12
        assert all(others)
