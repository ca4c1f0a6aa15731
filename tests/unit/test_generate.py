"""Generation with a key/value cache against the whole model over the whole text for each token; drawing of tokens."""

import itertools
from functools import partial

import numpy as np
import pytest

from gpt2.config import GPT2Config
from gpt2.errors import UserError
from gpt2.inference.cached_model import CachedGPT2
from gpt2.inference.generated_text import Sampling, check_prompt, generate
from gpt2.kernels import load_kernels
from gpt2.model import GPT2
from gpt2.parameters import Layout, Parameters, initialize
from tests.support.logits import logits_of

CONFIG = GPT2Config(n_layer=2, n_head=2, n_embd=24, context=17, vocab_size=101)
PROMPTS = ([7], [3, 1, 4, 1, 5, 9, 2, 6], list(range(17)))


def new_parameters(config=CONFIG, seed=5, dtype=np.float32) -> Parameters:
    """Far enough from the initialization that positions, keys and values matter."""
    parameters = Parameters.zeros(Layout(config))
    initialize(parameters, seed)
    random = np.random.default_rng(seed)
    parameters.flat += random.normal(0, 0.2, parameters.flat.shape)
    parameters.wte[config.vocab_size :] = 50.0  # pad rows must never be drawn
    return Parameters(parameters.layout, parameters.flat.astype(dtype))


@pytest.fixture(scope="module", params=[1, 3], ids="{} threads".format)
def kernels(request):
    return load_kernels("numpy", request.param)


def without_cache(kernels, parameters, text, choose, count, length=CONFIG.context) -> list[int]:
    """The reference: gpt2.model's forward over all of the text, again for each token, as nanoGPT does it; of a text
    longer than `length` the newest half of it stays."""
    text, new = list(text), []
    for _ in range(count):
        logits = logits_of(GPT2(kernels, parameters, None, 1, len(text)), np.array([text], np.int32))[0, -1]
        new.append(choose(logits))
        text.append(new[-1])
        if len(text) > length:
            text = text[-(length // 2) :]
    return new


@pytest.mark.parametrize("settings", [(0,), (1.0, 0, 1.0), (0.7, 20, 1.0), (0.9, 40, 0.9)], ids=str)
def test_the_cache_gives_the_same_tokens(settings):
    """Up to the context's end and twice beyond it."""
    kernels, parameters, sampling = load_kernels("numpy", 1), new_parameters(), Sampling(*settings)
    model, texts = CachedGPT2(kernels, parameters), set()
    for prompt, seed in itertools.product(PROMPTS, (1, 2)):

        def new_choose(seed=seed):
            return partial(sampling.choose, random=np.random.default_rng(seed))

        found = list(generate(model, prompt, new_choose(), 30))
        assert found == without_cache(kernels, parameters, prompt, new_choose(), 30)
        assert max(found) < CONFIG.vocab_size
        texts.add(tuple(found))
    assert len(texts) == len(PROMPTS) * (1 if settings == (0,) else 2), "prompts and seeds must matter"


LONG = GPT2Config(n_layer=2, n_head=3, n_embd=12, context=300, vocab_size=50)  # several blocks of queries
CUTS = ([0, 17], range(18), [0, 1, 7, 8, 12, 17])


@pytest.mark.parametrize(
    ("config", "all_cuts", "dtype", "tolerance"),
    [
        (CONFIG, CUTS, np.float32, 1e-4),
        (CONFIG, CUTS, np.float64, 1e-12),
        (LONG, ([0, 290, 300],), np.float32, 1e-4),
    ],
    ids=["float32", "float64", "long"],
)
def test_logits_at_every_position(kernels, config, all_cuts, dtype, tolerance):
    """The text in one piece, one by one, and in pieces of other lengths."""
    parameters = new_parameters(config, dtype=dtype)
    text = np.random.default_rng(2).integers(config.vocab_size, size=config.context)
    expected = logits_of(GPT2(kernels, parameters, None, 1, len(text)), text[None].astype(np.int32))[0]
    assert np.abs(expected).max() > 1
    for cuts in all_cuts:
        model = CachedGPT2(kernels, parameters)
        for start, stop in itertools.pairwise(cuts):
            logits = model.forward(text[start:stop])
            np.testing.assert_allclose(logits, expected[stop - 1], rtol=tolerance, atol=tolerance)
        assert model.length == config.context


def test_a_model_that_reads_less_than_its_context():
    """Twice beyond its 6 positions; the embeddings of all later ones are no numbers."""
    kernels, parameters = load_kernels("numpy", 1), new_parameters()
    expected = without_cache(kernels, parameters, [1, 2, 3], np.argmax, 15, length=6)
    assert expected != without_cache(kernels, parameters, [1, 2, 3], np.argmax, 15)
    parameters.wpe[6:] = np.nan
    assert list(generate(CachedGPT2(kernels, parameters, 6), [1, 2, 3], np.argmax, 15)) == expected


def test_a_context_of_one():
    config = GPT2Config(n_layer=1, n_head=1, n_embd=4, context=1, vocab_size=10)
    model = CachedGPT2(load_kernels("numpy", 1), new_parameters(config))
    assert len(list(generate(model, [3], np.argmax, 5))) == 5


def test_what_a_model_cannot_read():
    for prompt, words in (([], "0 tokens"), ([1] * 18, "18 tokens, expected 1 to 17"), ([101], "token 101")):
        with pytest.raises(UserError, match=words):
            check_prompt(np.array(prompt, np.uint16), CONFIG, 17)
    check_prompt(np.full(17, 100, np.uint16), CONFIG, 17)
    with pytest.raises(
        UserError, match="17 tokens, expected 1 to 16, the length of its sequences: shorten it, or raise"
    ):
        check_prompt(np.full(17, 100, np.uint16), CONFIG, 16)
    model = CachedGPT2(load_kernels("numpy", 1), new_parameters())
    model.forward([1] * 10)
    with pytest.raises(ValueError, match="8 tokens after 10"):
        model.forward([1] * 8)


def reference_probabilities(logits, temperature, top_k, top_p):
    """Token by token, likeliest first, as the papers say it."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[: top_k or len(logits)]
    weights = {token: np.exp((logits[token] - logits[order[0]]) / temperature) for token in order}
    nucleus, mass = [], 0.0
    for token in order:
        nucleus.append(token)
        mass += weights[token] / sum(weights.values())
        if mass >= top_p:
            break
    total = sum(weights[token] for token in nucleus)
    return [weights[token] / total if token in nucleus else 0.0 for token in range(len(logits))]


@pytest.mark.parametrize("temperature", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("top_k", [0, 1, 7, 50, 80])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.95, 1.0])
def test_probabilities(temperature, top_k, top_p):
    logits = np.random.default_rng(3).normal(0, 2, 50).astype(np.float32)
    logits[10:14] = logits[5]  # equals
    found = Sampling(temperature, top_k, top_p).probabilities(logits)
    expected = reference_probabilities(logits.astype(float), temperature, top_k, top_p)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-15)
    assert found.sum() == pytest.approx(1)


def test_tokens_are_drawn_with_their_probabilities():
    logits, sampling = np.log(np.array([0.1, 0.4, 0.0001, 0.3, 0.1999], np.float32)), Sampling(1.0, 4)
    random, draws = np.random.default_rng(1), 3_000
    counts = np.bincount([sampling.choose(logits, random) for _ in range(draws)], minlength=5)
    expected = sampling.probabilities(logits)
    assert counts[2] == 0
    assert (np.abs(counts / draws - expected) < 5 * np.sqrt(expected * (1 - expected) / draws) + 1e-12).all()


def test_the_ends_of_sampling():
    logits = np.array([1.0, 3.0, 3.0, -1e30], np.float32)
    random = np.random.default_rng(1)
    assert Sampling(0).choose(logits, random) == 1
    assert {Sampling(1e-300, 0).choose(logits, random) for _ in range(50)} == {1, 2}
    for bad in (np.nan, np.inf):
        with pytest.raises(UserError, match="not finite"):
            Sampling().choose(np.array([0.0, bad], np.float32), random)


@pytest.mark.parametrize("bad", [(-1,), (np.nan,), (np.inf,), (1, -1), (1, 0, 0), (1, 0, 1.1), (1, 0, np.nan)], ids=str)
def test_settings_that_mean_nothing(bad):
    with pytest.raises(UserError, match=r"^--(temperature|top-k|top-p) is .*, expected"):
        Sampling(*bad)
