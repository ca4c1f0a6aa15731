"""--sample-every: what rank 0 prints is what the parameters of that step write, also where no rank holds them all.

The model reads sequences of 8 tokens, as in training, although its context is 16.
"""

import re

import numpy as np
import pytest

from dist.world import start_world
from gpt2.data.shards import write_shard
from gpt2.data.tokenizers import byte_encoding
from gpt2.formats import weights
from gpt2.inference.cached_model import CachedGPT2
from gpt2.inference.generated_text import Sampling, printable, sample_text
from gpt2.kernels import load_kernels
from tests.support.in_process import train
from tests.support.refusal import refusal_of_all

SMALL = ["--n-layer", 2, "--n-head", 2, "--n-embd", 16, "--context", 16, "--lr", 1e-2, "--trace", "off", "--threads", 1]
STEPS = ["--steps", 4, "--sample-every", 2, "--checkpoint-every", 2, "--eval-every", 0, "--seq-len", 8]


@pytest.mark.ranks(3)
@pytest.mark.parametrize("strategy", [["zero-3"], ["hierarchical-sharded", "--overlap"], ["reduce-bcast"]], ids=str)
def test_samples_are_the_models(comm, shared_path, capsys, strategy):
    train(start_world(), shared_path / "run", *SMALL, *STEPS, "--strategy", *strategy)
    printed = capsys.readouterr().out
    if comm.rank:
        assert printed == ""
        return
    assert re.findall(r"^sample after step (\d+): ", printed, re.MULTILINE) == ["2", "4"]
    for step in (2, 4):
        parameters = weights.load(shared_path / "run" / "checkpoints" / f"step-{step:08d}")
        model = CachedGPT2(load_kernels("numpy", 1), parameters, 8)
        pieces = sample_text(model, byte_encoding(), "", 100, Sampling(), (1337, step))
        assert f"sample after step {step}: {printable(''.join(pieces))}\n" in printed


@pytest.mark.ranks(2)
def test_a_vocabulary_of_no_tokenizer_is_refused_before_training_unless_one_is_given(comm, shared_path, capsys):
    tokens, flags = shared_path / "tokens.bin", [*SMALL, *STEPS]
    if comm.rank == 0:
        write_shard(tokens, np.arange(1000) % 100)
    comm.Barrier()
    data = ["--train-data", tokens, "--vocab-size", 100]
    line = refusal_of_all(comm, capsys, train, start_world(), shared_path / "run", *flags, *data)
    assert "a model of 100 tokens, expected 50257 or 256" in line
    data = ["--train-data", tokens, "--vocab-size", 300, "--tokenizer", "bytes"]
    train(start_world(), shared_path / "b", *flags, *data)
    assert capsys.readouterr().out.count("sample after step") == (2 if comm.rank == 0 else 0)
