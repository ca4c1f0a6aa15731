"""zero-2 and zero-3: what no rank holds, and layers that take turns in memory."""

import tracemalloc

import numpy as np
import pytest

from dist.progress_engine import progressing
from dist.sharded import Slots
from dist.world import world_of
from gpt2.config import GPT2Config
from gpt2.kernels import load_kernels
from gpt2.model import GPT2
from gpt2.optimizer import AdamW, AdamWSettings, Clipping
from gpt2.parameters import Layout, Parameters, initialize
from strategies import STRATEGIES
from tests.support.jobs import host_job
from traces import Tracer

DEEP = GPT2Config(n_layer=5, n_head=1, n_embd=3, context=4, vocab_size=7)  # no range divides by 2 or 4, or by 3 and 4
WIDE = GPT2Config(n_layer=8, n_head=2, n_embd=96, context=16, vocab_size=128)  # layers are most of it
LENGTH = 4
KERNELS = load_kernels("numpy", 1)
ADAMW = AdamWSettings(eps=1e-4)
CASES = [(name, overlap) for name in ("zero-2", "zero-3") for overlap in (None, 0)]


class Training:
    """A strategy on one rank of `comm`, with a model of `batch_size` sequences."""

    def __init__(self, comm, name, config, batch_size, length, **options):
        world = world_of(comm, comm.Split(0, comm.rank))
        self.layout = Layout(config, multiple_of=world.size)
        buffers = STRATEGIES[name].traits.buffers(world, self.layout.size, self.layout.ranges)
        self.parameters = Parameters(self.layout, buffers.parameters)
        self.gradients = Parameters(self.layout, buffers.gradients)
        initialize(self.parameters, 3, buffers.filled)
        job = host_job(
            STRATEGIES[name], segment_bytes=1 << 20,
            world=world, buffers=buffers, sum_of_squares=KERNELS.sum_of_squares, clipping=Clipping(0.3),
            tracer=Tracer(),
            new_optimizer=lambda start, stop: AdamW(KERNELS, self.layout, start, stop, ADAMW),
            final_ranges=self.layout.final_ranges(), **options,
        )  # fmt: skip
        self.strategy = STRATEGIES[name](job)
        kernels = progressing(KERNELS, self.strategy.progress)
        before = tracemalloc.get_traced_memory()[0]
        self.model = GPT2(kernels, self.parameters, self.gradients, batch_size, length, self.strategy.before_use)
        self.model_bytes = tracemalloc.get_traced_memory()[0] - before

    def step(self, micro_batches, scale, lr=1e-2):
        """(this rank's part of the loss, norm) of a step, as scripts/training/worker.py does it."""
        loss = 0.0
        for index, tokens in enumerate(micro_batches):
            loss += self.model.forward(tokens[:, :-1], tokens[:, 1:], scale) * scale
            keeps = self.strategy.traits.keeps_gradients
            final = [self.strategy.gradients_final] if not keeps or index == len(micro_batches) - 1 else []
            self.model.backward(keeps and index > 0, *final)
        return loss, self.strategy.update(lr)

    def ranges(self):
        """Each range of the parameters, once it is there."""
        for start, stop in self.layout.ranges:
            self.strategy.before_use(start, stop)
            yield self.parameters.flat[start:stop]


def expected_elements(name, layout, ranks):
    """Float32 values of a rank: whole vectors, the parts it owns, and room for the ranges in use."""
    embeddings, layer, *_, last = (stop - start for start, stop in layout.ranges)
    part, room = layout.size / ranks, embeddings + 2 * layer + last
    return {"zero-2": layout.size + 3 * part + room, "zero-3": 4 * part + 2 * room}[name]


@pytest.mark.ranks(2, 4)
def test_what_no_rank_holds_is_nowhere(comm):
    """The highest sum of all arrays alive at once, from the first buffer to a checkpoint, activations taken off.

    Room to spare is less than a third of a vector: a hidden copy of one, however short its life, does not fit.
    """
    tokens = np.random.default_rng(1).integers(WIDE.vocab_size, size=(2, 1, 9)).astype("i4")

    def peak_elements(name, **options):
        tracemalloc.start()
        training = Training(comm, name, WIDE, 1, 8, **options)
        for _ in range(2):
            training.step(tokens, 1.0 / 16)
        if name != "reduce-scatter":
            for part in training.ranges():
                assert part.any()
        peak = tracemalloc.get_traced_memory()[1] - training.model_bytes
        tracemalloc.stop()
        return peak / 4, training.layout

    peak_elements("reduce-scatter")  # the kernels' code is loaded once: that memory is no vector's
    for name, bucket_bytes in CASES:
        peak, layout = peak_elements(name, bucket_bytes=bucket_bytes)
        expected, spare = expected_elements(name, layout, comm.size), 0.3 * layout.size
        assert expected < peak < expected + spare, f"{name}: {peak / layout.size} vectors"
    whole, _ = peak_elements("reduce-scatter")
    assert whole > expected_elements("zero-2", layout, comm.size) + spare, "the measure must see a whole vector"


@pytest.mark.ranks(3)
def test_bfloat16_keeps_the_owners_parameters_exact(comm):
    """Steps far smaller than bfloat16 can tell apart add up at the owner, and so in what the others receive."""
    tokens = np.random.default_rng(1).integers(DEEP.vocab_size, size=(1, 2, LENGTH + 1)).astype("i4")
    for name in ("zero-2", "zero-3"):
        training = Training(comm, name, DEEP, 2, LENGTH, wire="bfloat16")
        before = np.concatenate([part.copy() for part in training.ranges()])
        for _ in range(40):
            training.step(tokens, 1.0 / 8, lr=1e-4)
        after = np.concatenate([part.copy() for part in training.ranges()])
        start = training.layout.by_name["lnf_weight"].start  # 1, to begin with
        moved = np.abs(after - before)[start : start + DEEP.n_embd]
        assert (moved > 1e-3).any(), f"{name}: {moved}"


@pytest.mark.ranks(1)
def test_a_layer_is_gathered_one_ahead_and_not_twice(comm):
    """What is gathered when, seen from the model: in forward, in backward, and in the next micro-step."""
    events = []
    training = Training(comm, "zero-3", DEEP, 2, LENGTH, bucket_bytes=0)
    names = dict(zip(training.layout.ranges, "E12345F", strict=True))
    gather, before_use = training.strategy._all_gather, training.strategy.before_use
    training.strategy._all_gather = lambda start, stop: events.append("+" + names[start, stop]) or gather(start, stop)

    def use(start, stop):
        before_use(start, stop)
        events.append(names[start, stop])

    training.model.before_use = training.model.embedding.before_use = use
    training.step(np.ones((2, 2, LENGTH + 1), np.int32), 1.0 / 16)
    forward, backward = "+E +1 E +2 1 +3 2 +4 3 +5 4 +F 5 F", "F 5 +3 4 +2 3 +1 2 1"
    again = "E 1 +3 2 +4 3 +5 4 5 F"
    assert " ".join(events) == " ".join((forward, backward, again, backward))
    events.clear()
    training.model.token_losses(*np.ones((2, 2, LENGTH), np.int32))
    assert " ".join(events) == forward, "after an update everything is gathered anew"


def test_slots_are_shared_but_not_by_neighbours():
    ranges = ((0, 7), (7, 10), (10, 14), (14, 16), (16, 17))
    slots = Slots(ranges)
    assert slots.shape == (17,)
    assert sum(len(memory) for memory in slots.memory) == 7 + 3 + 4 + 1
    for start, stop in ranges:
        slots[start:stop].fill(start)
        assert (slots[stop - 1 : stop] == start).all()
        for low, high in ranges:
            neighbours = low == stop or high == start
            assert not (neighbours and np.shares_memory(slots[start:stop], slots[low:high]))
    assert np.shares_memory(slots[7:10], slots[14:16])
