"""Every strategy on ranks that are threads, over an MPI that delivers late, with a rank that dawdles: the same bits."""

import itertools
import time
from functools import cache

import numpy as np
import pytest

from gpt2.optimizer import AdamW, AdamWSettings
from strategies import STRATEGIES
from strategies.bucketed import plan_buckets
from tests.ranks import test_overlap as small
from tests.support.thread_ranks import run_ranks, share_memory

STEPS, MAX_NORM = 2, 0.3
DAWDLING_S = 5e-3
KNOWN_NODES, OTHER_NODES = ([2], [1, 1], [1, 2], [2, 2], [2, 1, 2, 1]), ([2], [3])  # ranks of each node


class Dawdling(AdamW):
    """Of the rank that updates last: who does not wait for it goes on with its old parameters."""

    def update(self, *arguments):
        time.sleep(DAWDLING_S)
        super().update(*arguments)


class Training(small.Training):
    def __init__(self, world, name, slow, **options):
        self.optimizer_kind = Dawdling if world.rank == slow else AdamW
        super().__init__(world, name, MAX_NORM, segment_bytes=1000, **options)

    def _new_optimizer(self, start, stop):
        self.state.append(stop - start)
        return self.optimizer_kind(small.KERNELS, self.layout, start, stop, AdamWSettings(eps=1e-4))


@pytest.fixture(autouse=True)
def _shared_in_process(monkeypatch):
    share_memory(monkeypatch)


def train(nodes, name, options, most=0, slow=None):
    """Of each rank: its parameters at the end, and its losses and norms on the way."""

    def program(world):
        training = Training(world, name, slow, **options)
        numbers = [training.step(batch) for batch in small.TOKENS[:STEPS]]
        return training.whole(), np.array([[number or 0.0 for number in step] for step in numbers])

    return run_ranks(nodes, program, most=most, slow=slow)


@cache
def alone():
    """Parameters and numbers of one rank."""
    ((parameters, numbers),) = train([1], "allreduce", {})
    return parameters, numbers


def cases():
    for name, kind in STRATEGIES.items():
        if not kind.traits.same_weights:
            continue
        options = [{}] if kind.traits.exchanges else []
        if kind.traits.overlaps:
            options += [{"bucket_bytes": 400}, {"bucket_bytes": 0, "wire": "bfloat16"}]
        if kind.traits.overlaps and kind.traits.knows_nodes:
            options += [{"bucket_bytes": 0, "wire": "bfloat16", "error_feedback": True}]
        if "int8" in kind.traits.wires:
            options += [{"bucket_bytes": 400, "wire": "int8", "error_feedback": True}, {"wire": "int8"}]
        yield from itertools.product([name], options, KNOWN_NODES if kind.traits.knows_nodes else OTHER_NODES)


@pytest.mark.parametrize(("name", "options", "nodes"), list(cases()), ids=str)
def test_late_messages_and_a_dawdling_rank_change_no_bit(name, options, nodes):
    ranks = sum(nodes)
    kind = train(nodes, name, options)
    late = train(nodes, name, options, most=1, slow=ranks - 1)
    for rank, (one, other) in enumerate(zip(kind, late, strict=True)):
        for expected, found in zip(one, other, strict=True):
            np.testing.assert_array_equal(found, expected, err_msg=f"rank {rank}")
    assert len({parameters.tobytes() for parameters, _ in kind}) == 1, "the ranks' parameters differ"
    parameters, numbers = alone()
    size, close = (
        min(len(parameters), len(kind[0][0])),
        {"float32": 1e-5, "bfloat16": 3e-2, "int8": 6e-2}[options.get("wire", "float32")],
    )
    np.testing.assert_allclose(kind[0][0][:size], parameters[:size], atol=close)
    losses = sum(found for _, found in kind)[:, 0]
    np.testing.assert_allclose(losses, numbers[:, 0], rtol=close)
    np.testing.assert_allclose(kind[0][1][:, 2], numbers[:, 2], rtol=close)


@pytest.mark.parametrize(
    ("name", "options"),
    [(name, {}) for name, kind in STRATEGIES.items() if kind.traits.exchanges]
    + [(name, {"bucket_bytes": 400}) for name, kind in STRATEGIES.items() if kind.traits.overlaps],
    ids=str,
)
def test_a_rank_holds_the_optimizer_state_that_its_strategy_declares(name, options):
    """The rank that holds most, up to a few parameters for each cut of a range."""
    for nodes in [2], [1, 1], [2, 2], [1, 2]:
        trainings = run_ranks(nodes, lambda world: Training(world, name, None, **options))
        held = 2 * 4 * max(sum(training.state) for training in trainings)
        size = trainings[0].layout.size
        declared = STRATEGIES[name].traits.memory.of_rank(size, sum(nodes), len(nodes), bool(options)).optimizer
        cuts = 16 * max(len(training.state) for training in trainings)
        assert abs(held - declared) <= cuts, f"{nodes}: holds {held / 4 / size} vectors, declares {declared / 4 / size}"


def test_a_bucket_is_full_when_it_holds_as_many_bytes():
    """Of float32; the last takes what is left."""
    final = [(90, 100), (60, 90), (30, 60), (0, 30)]
    assert plan_buckets(final, 4 * 40) == [(60, 100), (0, 60)]
    assert plan_buckets(final, 4 * 40 + 1) == [(30, 100), (0, 30)]
    assert plan_buckets(final, 0) == final


@pytest.mark.parametrize(
    "name", ["hierarchical-sharded", "reduce-bcast", "sliced-in-turn", "sliced", "reduce-scatter", "allreduce"]
)
def test_steps_below_the_rounding_of_the_wire_add_up(name):
    """40 steps of 1e-4 around 1, where two bfloat16 numbers are 4e-3 apart: what is gathered moves in the end."""

    def program(world):
        training = Training(world, name, None, wire="bfloat16")
        for _ in range(40):
            training.buffers.gradients.fill(1.0)
            training.strategy.update(1e-4)
        start = training.layout.by_name["lnf_weight"].start
        return training.whole()[start : start + 5]

    for found in run_ranks([1, 1], program):
        assert (found < 1).any()


@pytest.mark.parametrize(
    "name", [name for name, kind in STRATEGIES.items() if kind.traits.exchanges and name != "zero-3"]
)
def test_without_overlap_an_update_ends_when_all_parameters_are_there(name):
    """Before anybody uses them, and with messages that come late."""

    def program(world):
        training = Training(world, name, None)
        training.step(small.TOKENS[0], validates=False)
        after = training.parameters.flat.copy()
        return after, training.whole()

    for after, whole in run_ranks([1, 2], program, most=3, slow=1):
        np.testing.assert_array_equal(after, whole)
