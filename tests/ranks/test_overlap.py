"""--overlap beyond backward: parameters arrive while the next forward computes, and it waits where it uses them."""

import time

import numpy as np
import pytest

from dist.host import exchange
from dist.progress_engine import progressing
from dist.ranges import cut
from dist.waiting import Condition
from dist.world import world_of
from gpt2.config import GPT2Config
from gpt2.kernels import load_kernels
from gpt2.model import GPT2
from gpt2.optimizer import AdamW, AdamWSettings, Clipping
from gpt2.parameters import Layout, Parameters, initialize
from strategies import STRATEGIES
from tests.support.jobs import host_job
from traces import Tracer

CONFIG = GPT2Config(n_layer=3, n_head=1, n_embd=5, context=4, vocab_size=7)  # few of its ranges divide by anything
STEPS, MICRO_STEPS, GLOBAL_BATCH, LENGTH = 4, 2, 24, 4
TOKENS = np.random.default_rng(5).integers(CONFIG.vocab_size, size=(STEPS, GLOBAL_BATCH, LENGTH + 1)).astype("i4")
KERNELS = load_kernels("numpy", 1)


class Training:
    """A strategy on one rank, with the micro-steps, the validation and the last look of scripts/train.py."""

    config, global_batch, micro_steps = CONFIG, GLOBAL_BATCH, MICRO_STEPS

    def __init__(self, world, name, max_norm=0.0, split=False, **options):
        self.layout = Layout(self.config, multiple_of=world.size)
        self.buffers = STRATEGIES[name].traits.buffers(world, self.layout.size, self.layout.ranges)
        self.parameters, gradients = (
            Parameters(self.layout, flat) for flat in (self.buffers.parameters, self.buffers.gradients)
        )
        if self.buffers.fills_parameters:
            initialize(self.parameters, 3, self.buffers.filled)
        world.comm.Barrier()
        table = self.layout.by_name["wte"].shape
        self.lookup = self.buffers.new_sparse_gradient(table, table[0]) if split else None
        self.state = []  # elements of each AdamW
        job = host_job(
            STRATEGIES[name],
            world=world, buffers=self.buffers, new_optimizer=self._new_optimizer, clipping=Clipping(max_norm),
            tracer=Tracer(), sum_of_squares=KERNELS.sum_of_squares, sparse=self.lookup,
            final_ranges=tuple(part for part in self.layout.final_ranges(split) if part[0] < part[1]), **options,
        )  # fmt: skip
        self.strategy = STRATEGIES[name](job)
        self.share = slice(*cut(self.global_batch, world.size)[world.rank])
        rows = (self.share.stop - self.share.start) // self.micro_steps
        kernels = progressing(KERNELS, self.strategy.progress)
        self.model = GPT2(
            kernels, self.parameters, gradients, rows, LENGTH, self.strategy.before_use, lookup=self.lookup
        )

    def _new_optimizer(self, start, stop):
        self.state.append(stop - start)
        return AdamW(KERNELS, self.layout, start, stop, AdamWSettings(eps=1e-4))

    def step(self, batch, validates=True, next_batch=None):
        """This rank's losses, before the update and in a validation after it, and the norm."""
        if self.lookup:
            next_batch = batch if next_batch is None else next_batch
            self.lookup.begin(np.unique(batch[self.share]), np.unique(next_batch[self.share]))
        loss, keeps = 0.0, self.strategy.traits.keeps_gradients
        for index, tokens in enumerate(np.split(batch[self.share], self.micro_steps)):
            loss += self.model.forward(tokens[:, :-1], tokens[:, 1:], 1.0 / (self.global_batch * LENGTH))
            final = [self.strategy.gradients_final] if not keeps or index == self.micro_steps - 1 else []
            self.model.backward(keeps and index > 0, *final)
        norm = self.strategy.update(1e-2)
        validation = self.model.token_losses(tokens[:, :-1], tokens[:, 1:]).sum() if validates else 0.0
        return loss, float(validation), norm

    def whole(self):
        """All parameters (size,), each range once it may be used."""
        parts = []
        for start, stop in self.layout.ranges:
            self.strategy.before_use(start, stop)
            parts.append(self.parameters.flat[start:stop].copy())
        return np.concatenate(parts)


def train(world, name, **options):
    """Bits of the parameters, and all numbers on the way."""
    training = Training(world, name, **options)
    numbers = [training.step(batch) for batch in TOKENS]
    return training.whole(), numbers


def nodes_of(comm, sizes):
    """The ranks as nodes of these sizes."""
    node = np.repeat(np.arange(len(sizes)), sizes)[comm.rank]
    return world_of(comm, comm.Split(node, comm.rank))


@pytest.mark.ranks(4)
def test_overlap_changes_no_bit_where_no_sum_changes_its_order(comm):
    """Sums over one node, or two, have one order; over more, or with clipping, they are compared as numbers."""
    for sizes in ([3, 1], [1, 2, 1]):
        for name in ("hierarchical-sharded", "zero-2"):
            for max_norm, bucket_bytes in ((0.0, 0), (0.3, 700)):
                world, case = nodes_of(comm, sizes), f"{name} {sizes} {max_norm}"
                expected, expected_numbers = train(world, name, max_norm=max_norm)
                found, numbers = train(world, name, max_norm=max_norm, bucket_bytes=bucket_bytes)
                assert len(set(comm.allgather(found.tobytes()))) == 1, f"{case}: ranks differ"
                if name == "zero-2" or (len(sizes) < 3 and not max_norm):
                    assert found.tobytes() == expected.tobytes(), case
                np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5, err_msg=case)
                np.testing.assert_allclose(numbers, expected_numbers, rtol=1e-5, err_msg=case)


@pytest.mark.ranks(3)
def test_rounded_parameters_arrive_rounded_on_every_rank(comm):
    """On two nodes, bfloat16 on the wire: what is sharded is gathered rounded, from masters that are not; what is
    replicated keeps all its bits."""
    world = nodes_of(comm, [1, 2])
    exact, _ = train(world, "hierarchical-sharded", bucket_bytes=0)
    found, _ = train(world, "hierarchical-sharded", bucket_bytes=0, wire="bfloat16")
    assert len(set(comm.allgather(found.tobytes()))) == 1
    again, _ = train(world, "hierarchical-sharded", bucket_bytes=0, wire="bfloat16")
    assert again.tobytes() == found.tobytes()
    assert 1e-6 < np.abs(found - exact).max() < 2e-2
    is_rounded = (found.view(np.uint32) & 0xFFFF) == 0
    assert 0.6 < is_rounded.mean() < 0.8


class Gates:
    """Stands for the ring module: once they are `closed`, all-gathers wait, each until its range's end is let go."""

    def __init__(self, ring):
        self.ring, self.let_go, self.closed = ring, set(), False

    def __getattr__(self, name):
        return getattr(self.ring, name)

    def all_gather(self, comm, flat, start, stop, wire, tag):
        yield Condition(lambda: not self.closed or stop in self.let_go)
        yield from self.ring.all_gather(comm, flat, start, stop, wire, tag)


@pytest.mark.ranks(3)
def test_nobody_uses_parameters_that_have_not_arrived(comm, monkeypatch):
    """On the second node is a rank without a rail. The gathers are held, let go in the wrong order, and late: a rank
    that did not wait would read the old values."""
    world = nodes_of(comm, [1, 2])
    expected, _ = train(world, "hierarchical-sharded", bucket_bytes=0)
    gates = Gates(exchange.host_ring)
    monkeypatch.setattr(exchange, "host_ring", gates)
    training = Training(world, "hierarchical-sharded", bucket_bytes=0)
    strategy, (first, *others) = training.strategy, training.layout.ranges
    for batch in TOKENS[:-1]:
        training.step(batch)
    training.whole()
    gates.closed = True
    training.step(TOKENS[-1], validates=False)
    assert not np.array_equal(training.parameters.flat, expected), "update ends before the parameters are there"
    comm.Barrier()

    first_stop, second_stop, *stops = (stop for _, stop in reversed(strategy.buckets))
    gates.let_go.add(second_stop)
    for _ in range(100):
        strategy.progress()
        assert not strategy.node.arrived(strategy.rails, strategy.gathers.started + 1).Test()
        time.sleep(1e-4)
    comm.Barrier()
    if strategy.rail is not None:
        time.sleep(0.02)  # meanwhile the rank without a rail already waits
        gates.let_go.add(first_stop)
    strategy.before_use(*first)
    np.testing.assert_array_equal(training.parameters.flat[slice(*first)], expected[slice(*first)])
    comm.Barrier()
    assert not np.array_equal(training.parameters.flat, expected), "the others are still on their way"
    comm.Barrier()
    gates.let_go.update(stops)
    for start, stop in others:
        strategy.before_use(start, stop)
        np.testing.assert_array_equal(training.parameters.flat[start:stop], expected[start:stop])
