"""The token embedding in two parts, the head's and the lookup's: the same training, on ranks that are threads."""

import numpy as np
import pytest

from gpt2 import parameters
from gpt2.config import GPT2Config
from strategies import STRATEGIES
from tests.support.thread_ranks import run_ranks, share_memory
from tests.unit.test_strategies_in_threads import Training as Dawdlers

STEPS, GLOBAL_BATCH, VOCABULARY = 4, 72, 37
NODES = ([1], [2], [1, 1], [1, 2], [2, 2], [2, 1, 2, 3, 1])  # ranks of each
SPLITTING = [name for name, kind in STRATEGIES.items() if kind.splits_embedding]


class Training(Dawdlers):
    global_batch = GLOBAL_BATCH
    config = GPT2Config(n_layer=2, n_head=1, n_embd=5, context=4, vocab_size=VOCABULARY)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    share_memory(monkeypatch)
    monkeypatch.setattr(parameters, "HEAD_ROWS", 6)


def batches(kind):
    """(STEPS, GLOBAL_BATCH, 5) tokens: of all, of a few that repeat, or one alone."""
    random = np.random.default_rng(7)
    shape = STEPS, GLOBAL_BATCH, 5
    drawn = {"any": random.integers(VOCABULARY, size=shape), "few": random.integers(3, 7, size=shape)}
    return drawn.get(kind, np.full(shape, 11)).astype("i4")


def train(nodes, name, kind="any", most=0, slow=None, validates=False, **options):
    """Of each rank: its parameters at the end, and its numbers on the way."""
    tokens = batches(kind)

    def program(world):
        training = Training(world, name, slow, **options)
        numbers = [
            training.step(batch, validates, following)
            for batch, following in zip(tokens, [*tokens[1:], tokens[0]], strict=True)
        ]
        return training.whole(), np.array([[number or 0.0 for number in step] for step in numbers])

    return run_ranks(nodes, program, most=most, slow=slow)


@pytest.mark.parametrize("kind", ["any", "few", "one"])
@pytest.mark.parametrize("nodes", NODES, ids=str)
@pytest.mark.parametrize("name", SPLITTING)
def test_split_and_whole_embeddings_give_the_same_weights(name, nodes, kind):
    for bucket_bytes in (0, 300):
        expected = train(nodes, name, kind, bucket_bytes=bucket_bytes)
        found = train(nodes, name, kind, bucket_bytes=bucket_bytes, split=True)
        assert len({weights.tobytes() for weights, _ in found}) == 1, "the ranks' parameters differ"
        np.testing.assert_allclose(found[0][0], expected[0][0], rtol=1e-5, atol=2e-6)
        for (_, numbers), (_, others) in zip(found, expected, strict=True):
            np.testing.assert_allclose(numbers, others, rtol=2e-6)
