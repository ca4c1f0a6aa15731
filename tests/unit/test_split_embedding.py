"""The token embedding in two parts, the head's and the lookup's: the same training, on ranks that are threads."""

from itertools import pairwise

import numpy as np
import pytest

from dist.host import sparse_exchange
from gpt2 import parameters
from gpt2.config import GPT2Config
from gpt2.parameters import Layout
from strategies import STRATEGIES
from strategies.bucketed import plan_buckets
from tests.support.thread_ranks import run_ranks, share_memory
from tests.unit.test_strategies_in_threads import Training as Dawdlers

STEPS, GLOBAL_BATCH, VOCABULARY = 4, 144, 37
SPLITTING = [name for name, kind in STRATEGIES.items() if kind.traits.splits_embedding]
NINE = [2, 1, 2, 3, 1]  # ranks of each node
BITS = {"any": 0, "few": 300, "one": 700}  # bytes of a bucket, with each kind of batch


class Training(Dawdlers):
    global_batch = GLOBAL_BATCH
    config = GPT2Config(n_layer=2, n_head=1, n_embd=5, context=4, vocab_size=VOCABULARY)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    share_memory(monkeypatch)
    monkeypatch.setattr(parameters, "HEAD_ROWS", 6)
    monkeypatch.setattr(sparse_exchange, "SEGMENT_BYTES", 3 * 4 * 5)


def batches(kind):
    """(STEPS, GLOBAL_BATCH, 5) tokens: of all, of a few that repeat, or one alone in each step."""
    random = np.random.default_rng(7)
    shape = STEPS, GLOBAL_BATCH, 5
    drawn = {"any": random.integers(VOCABULARY, size=shape), "few": random.integers(3, 7, size=shape)}
    drawn["one"] = np.broadcast_to(np.arange(11, 11 + STEPS)[:, None, None], shape)
    return drawn[kind].astype("i4")


def train(nodes, name, kind="any", most=0, slow=None, validates=False, micro_steps=2, **options):
    """Of each rank: its parameters at the end, and its numbers on the way."""
    tokens = batches(kind)

    def program(world):
        training = type("Steps", (Training,), {"micro_steps": micro_steps})(world, name, slow, **options)
        following = [*tokens[1:], tokens[0]]
        numbers = [training.step(*step) for step in zip(tokens, [validates] * STEPS, following, strict=True)]
        return training.whole(), np.array([[number or 0.0 for number in step] for step in numbers])

    return run_ranks(nodes, program, most=most, slow=slow)


def compare(found, expected, close):
    """The same on all ranks, and close to what another way gives."""
    assert len({weights.tobytes() for weights, _ in found}) == 1, "the ranks' parameters differ"
    np.testing.assert_allclose(found[0][0], expected[0][0], rtol=close, atol=close)
    for (_, numbers), (_, others) in zip(found, expected, strict=True):
        np.testing.assert_allclose(numbers, others, rtol=close)


def cases():
    for nodes in ([1], [2], [1, 1], [1, 2], [2, 2], NINE):
        yield from ((name, nodes, "any") for name in SPLITTING)
    yield from (("hierarchical-sharded", nodes, kind) for nodes in ([1, 1], NINE) for kind in ("few", "one"))
    yield from ((name, [1, 2], kind) for name in ("hierarchical", "ring") for kind in ("few", "one"))


@pytest.mark.parametrize(("name", "nodes", "kind"), list(cases()), ids=str)
def test_split_and_whole_embeddings_give_the_same_weights(name, nodes, kind):
    options = {"kind": kind, "bucket_bytes": BITS[kind]}
    compare(train(nodes, name, split=True, **options), train(nodes, name, **options), 2e-6)


@pytest.mark.parametrize("micro_steps", [1, 4])
@pytest.mark.parametrize("name", SPLITTING)
def test_rows_of_all_micro_steps_count(name, micro_steps):
    options = {"micro_steps": micro_steps, "bucket_bytes": 300}
    compare(train([1, 2], name, split=True, **options), train([1, 2], name, **options), 2e-6)


@pytest.mark.parametrize("feedback", [False, True], ids=["", "error feedback"])
@pytest.mark.parametrize("name", SPLITTING)
def test_bfloat16_on_the_wire_costs_as_much_as_before(name, feedback):
    """Looked-up rows are not rounded; the rest is, as ever."""
    options = {"bucket_bytes": 300, "wire": "bfloat16", "error_feedback": feedback}
    exact = train([2, 1], name, bucket_bytes=300)[0][0]
    whole, (split, *others) = train([2, 1], name, **options), train([2, 1], name, split=True, **options)
    assert all(weights.tobytes() == split[0].tobytes() for weights, _ in others)
    apart = [np.abs(weights - exact) for weights in (split[0], whole[0][0])]
    assert apart[0].mean() < 1.5 * apart[1].mean()
    assert apart[0].max() < 2e-2


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SPLITTING)
def test_late_messages_a_dawdling_rank_and_validations_change_no_bit(name, wire):
    """What is looked up in a validation is not what was fetched ahead."""
    options = {"bucket_bytes": 300, "wire": wire, "split": True}
    expected = train([2, 1, 3], name, validates=True, **options)
    found = train([2, 1, 3], name, validates=True, most=1, slow=5, **options)
    unhurried = train([2, 1, 3], name, most=2, **options)
    for one, other, third in zip(found, expected, unhurried, strict=True):
        np.testing.assert_array_equal(one[0], other[0])
        np.testing.assert_array_equal(one[1], other[1])
        np.testing.assert_array_equal(third[0], other[0])


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_rows_are_fetched_as_the_table_will_hold_them(wire):
    """They come before it, also where what is gathered is rounded."""

    def program(world):
        training = Training(world, "hierarchical-sharded", None, bucket_bytes=0, split=True, wire=wire)
        tokens = batches("few")
        training.step(tokens[0], False, tokens[1])
        training.strategy.before_use(0, 0)  # no range, but the rows
        ids, rows = training.lookup.next_rows()[0]
        fetched = np.array(rows)
        whole = training.whole()[: VOCABULARY * 5].reshape(VOCABULARY, 5)
        np.testing.assert_array_equal(fetched, whole[ids])
        return len(ids)

    assert run_ranks([1, 1], program, most=2) == [4, 4]


def test_a_split_layout_has_every_element_once(monkeypatch):
    layout = Layout(Training.config, 16)
    for ranges in (layout.split_ranges, layout.final_ranges(split=True)):
        bounds = sorted(ranges)
        assert [bounds[0][0], bounds[-1][1]] == [0, layout.size]
        assert all(before[1] == after[0] for before, after in pairwise(bounds))
    assert layout.final_ranges(split=True)[-1] == layout.split_ranges[0]
    rows = [(stop - start) / 5 for start, stop in layout.head_blocks]
    assert set(rows[:-1]) == {6.0}


def test_a_bucket_holds_no_head_and_others_together():
    final = [(20, 30), (10, 20), (0, 10), (90, 100), (60, 90), (30, 60)]
    assert plan_buckets(final, 4 * 15) == [(10, 30), (0, 10), (60, 100), (30, 60)]
