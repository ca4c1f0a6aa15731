"""Models that several ranks share, part by part and stage by stage, train to the weights of one serial rank."""

import time
from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest

from dist.stage_links import StageLinks
from dist.world import world_of
from gpt2.config import GPT2Config
from gpt2.model_shards import as_kernels_see
from gpt2.optimizer import AdamWSettings
from strategies import STRATEGIES
from tests.support.model_parallel import UNEVEN, Cut, Problem, Training, cuts, largest_errors, serial
from tests.support.pytorch_fixture import FOLDER

STEPS = 2


def check(world, cut, steps=STEPS):
    training = Training(world, cut)
    losses, norms = training.steps(steps)
    found = training.whole(), losses, norms
    training.close()
    parameters, loss, norm = largest_errors(found, serial(steps))
    assert parameters < 1e-5, f"{cut}: parameters differ by {parameters}"
    assert loss < 1e-5, f"{cut}: losses differ by {loss}"
    assert norm < 1e-4, f"{cut}: norms differ by {norm}"
    return found


def one_node(comm):
    return world_of(comm, comm.Split(0, comm.rank))


def few(ranks):
    """Yield all cuts with the two strategies that differ most, overlapping where they can, and every other strategy
    with one cut that has copies: the most mixed ones in turn.
    """
    main = ("hierarchical-sharded", "zero-3")
    for cut in cuts(ranks, main, schedules=("1f1b",)):
        if cut.bucket_bytes or not STRATEGIES[cut.strategy].traits.overlaps:
            yield cut
    yield from (cut for cut in cuts(ranks, main[:1], schedules=("gpipe",)) if cut.stages > 1)
    copied = [cut for cut in cuts(ranks, main[:1], schedules=("1f1b",)) if cut.copies > 1 and cut.bucket_bytes is None]
    most = max((cut.parts > 1) + (cut.stages > 1) for cut in copied)
    mixed = cycle(cut for cut in copied if (cut.parts > 1) + (cut.stages > 1) == most)
    for name, kind in STRATEGIES.items():
        if name not in (*main, "none") and kind.traits.shares_models:
            yield replace(next(mixed), strategy=name)


@pytest.mark.ranks(3, 4)
def test_every_cut_is_one_serial_rank(comm):
    assert max(serial(STEPS)[2]) > 0.3, "clipping must have been at work"
    world = one_node(comm)
    for cut in few(comm.size):
        check(world, cut)


@pytest.mark.ranks(4)
def test_the_same_bits_twice(comm):
    for shape in ((2, 2, 1), (1, 2, 2), (1, 1, 4)):
        for strategy in ("hierarchical-sharded", "zero-2"):
            cut = Cut(*shape, strategy, bucket_bytes=1000)
            first, again = (check(one_node(comm), cut, 2) for _ in range(2))
            assert first[1:] == again[1:], cut
            assert all(np.array_equal(first[0][name], again[0][name]) for name in first[0]), cut


@pytest.mark.ranks(4, 8)
def test_nodes_of_two_that_the_launcher_has_dealt_out(comm):
    """Parts on one node, copies and stages across; and parts across nodes, over messages."""
    world = world_of(comm, comm.Split(comm.rank % (comm.size // 2), comm.rank))
    shapes = {4: [(2, 2, 1), (1, 2, 2), (1, 4, 1), (2, 1, 2)], 8: [(2, 2, 2), (1, 4, 2)]}[comm.size]
    for number, shape in enumerate(shapes):
        strategy = ("hierarchical-sharded", "zero-3")[number % 2]
        check(world, Cut(*shape, strategy, bucket_bytes=1000), 2)


@pytest.mark.ranks(2, 4)
def test_a_pipeline_alone_has_the_serial_bits(comm):
    """One micro-step, and no parts: the same operations in the same order."""
    for schedule in ("1f1b", "gpipe"):
        training = Training(
            one_node(comm), Cut(1, 1, comm.size, "allreduce", schedule), micro_batch=UNEVEN.global_batch
        )
        losses, _ = training.steps(3)
        named = training.whole()
        training.close()
        reference, serial_losses, _ = serial(3)
        assert losses[0] == serial_losses[0]
        assert largest_errors((named, losses, [1]), (reference, serial_losses, [1]))[0] < 1e-6


@pytest.mark.ranks(2)
def test_the_heads_gradient_is_waited_for(comm, monkeypatch):
    """Also where the last stage has long done all else when it sends it."""
    send_head, finish, late = StageLinks.send_head, StageLinks.finish, []

    def send_late(links, values):
        if links.stage == links.stages - 1:
            late.append(values)
        else:
            send_head(links, values)

    def finish_with_it(links):
        while late:
            time.sleep(0.3)
            send_head(links, late.pop())
        finish(links)

    monkeypatch.setattr(StageLinks, "send_head", send_late)
    monkeypatch.setattr(StageLinks, "finish", finish_with_it)
    check(one_node(comm), Cut(1, 1, 2))


class Batches:
    """A fixture's batches as numbered windows: two for each step."""

    def __init__(self, batches):
        self.batches = batches.astype(np.int32)

    def read(self, first, inputs, targets):
        for row in range(len(inputs)):
            tokens = self.batches[(first + row) // 2][(first + row) % 2]
            inputs[row], targets[row] = tokens[:-1], tokens[1:]


@pytest.mark.ranks(4)
def test_twenty_steps_of_pytorch(comm):
    """Another program's model and optimizer (tests/fixtures/make_fixture.py), on two parts of two stages."""
    data = np.load(FOLDER / "tiny_gpt2.npz")
    lr, beta1, beta2, eps, weight_decay, clip = data["adamw"].tolist()

    def fill(parameters, filled):
        for tensor in parameters.layout.tensors:
            whole = np.zeros(as_kernels_see(tensor.name, tensor.whole_shape), np.float32)
            whole[: len(data[f"p/{tensor.name}"])] = data[f"p/{tensor.name}"]
            parameters.view(tensor.name)[:] = whole.reshape(tensor.whole_shape)[tensor.slices].reshape(tensor.shape)

    config, settings = GPT2Config(*data["shape"].tolist()), AdamWSettings(beta1, beta2, eps, weight_decay)
    problem = Problem(config, 136, 2, Batches(data["batches"]), lr, clip, settings, fill)
    for schedule in ("1f1b", "gpipe"):
        cut = Cut(1, 2, 2, "reduce-scatter", schedule, layers=(1, 1))
        training = Training(one_node(comm), cut, problem=problem)
        losses, norms = training.steps(20)
        training.close()
        np.testing.assert_allclose(losses, data["losses"], rtol=1e-4)
        np.testing.assert_allclose(norms, data["norms"], rtol=1e-3)


@pytest.mark.ranks(4)
def test_validation_between_steps(comm):
    """Forward only, through all stages; the loss of the worker's own windows, counted once."""
    training = Training(one_node(comm), Cut(2, 1, 2))
    reference = Training(one_node(comm), Cut(4, 1, 1))
    for each in (training, reference):
        each.steps(1)
    (losses, tokens), (expected, expected_tokens) = (
        np.sum(comm.allgather(each.worker.validation_loss(3)), axis=0) for each in (training, reference)
    )
    again = np.sum(comm.allgather(training.worker.validation_loss(3)), axis=0)
    assert tokens == 3 * 2 * 8
    assert expected_tokens == 3 * 4 * 8
    assert again.tolist() == [losses, tokens]
    single = np.sum(comm.allgather(reference.worker.validation_loss(1)), axis=0)
    assert single[1] == 4 * 8
    training.steps(1)
    assert losses / tokens == pytest.approx(expected / expected_tokens, rel=0.05)
    for each in (training, reference):
        each.close()
