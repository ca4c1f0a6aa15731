"""GPT-2's initialization, as its paper and llm.c have it."""

import math

import numpy as np
import pytest

from gpt2.config import GPT2Config
from gpt2.parameters import Layout, Parameters, initialize

CONFIG = GPT2Config(n_layer=8, n_head=2, n_embd=64, context=32, vocab_size=200)


@pytest.fixture(scope="module")
def parameters():
    made = Parameters.zeros(Layout(CONFIG, multiple_of=1024))
    made.flat.fill(7.0)  # what lay there before must not show
    initialize(made, seed=3)
    return made


def test_matrices_are_drawn_with_their_deviation(parameters):
    """0.02, and what ends a residual branch divided by the root of the branches, two a layer."""
    for layer in parameters.layers:
        for name in ("qkv_weight", "fc_weight"):
            assert np.std(getattr(layer, name)) == pytest.approx(0.02, rel=0.05)
        for name in ("attproj_weight", "fcproj_weight"):
            assert np.std(getattr(layer, name)) == pytest.approx(0.02 / math.sqrt(2 * CONFIG.n_layer), rel=0.05)
    assert np.std(parameters.wte[: CONFIG.vocab_size]) == pytest.approx(0.02, rel=0.05)
    assert np.std(parameters.wpe) == pytest.approx(0.02, rel=0.05)


def test_the_rest_begins_at_one_or_nothing(parameters):
    for layer in parameters.layers:
        assert (layer.ln1_weight == 1).all()
        assert (layer.ln2_weight == 1).all()
        for name in ("ln1_bias", "qkv_bias", "attproj_bias", "ln2_bias", "fc_bias", "fcproj_bias"):
            assert not getattr(layer, name).any()
    assert (parameters.lnf_weight == 1).all()
    assert not parameters.lnf_bias.any()
    assert not parameters.wte[CONFIG.vocab_size :].any()
    assert not parameters.flat[parameters.layout.count :].any()
