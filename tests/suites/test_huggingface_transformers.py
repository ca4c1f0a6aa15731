"""Real transformers on the other side (pip install -e '.[huggingface]'; skipped where it is missing): models that it
saves give the same logits and loss here, and what we export is the same model there."""

import os

import numpy as np
import pytest

from gpt2.config import PRESETS
from gpt2.data.tokenizers import byte_encoding
from gpt2.formats import huggingface_export, llmc, weights
from gpt2.formats.huggingface import names_and_shapes
from gpt2.kernels import load_kernels
from gpt2.model import new_model
from gpt2.parameters import Layout, Parameters, initialize
from tests.support.logits import logits_of

WHY = "install it with pip install -e '.[huggingface]'"
torch = pytest.importorskip("torch", reason=f"no torch: {WHY}")
os.environ["TRANSFORMERS_OFFLINE"] = "1"  # read when it is imported
transformers = pytest.importorskip("transformers", reason=f"no transformers: {WHY}")
import tokenizers  # noqa: E402

from gpt2.formats.huggingface_tokenizer import write_tokenizer  # noqa: E402
from tests.fixtures.make_huggingface_fixture import expected, random_model  # noqa: E402
from tests.unit.test_huggingface_tokenizer import TEXTS, small  # noqa: E402, F401

SHAPES = {
    "one layer": {"n_layer": 1, "n_head": 1, "n_embd": 8, "n_positions": 5, "vocab_size": 3},
    "bytes": {"n_layer": 2, "n_head": 4, "n_embd": 64, "n_positions": 64, "vocab_size": 256},
    "odd": {"n_layer": 3, "n_head": 3, "n_embd": 21, "n_positions": 37, "vocab_size": 1001},
}


def tokens_for(shape):
    size = (3, shape["n_positions"] + 1)
    return torch.randint(shape["vocab_size"], size, generator=torch.Generator().manual_seed(5))


def assert_same_model(parameters: Parameters, model, shape, tolerance=1e-4):
    """Logits and loss of both, in float32."""
    tokens = tokens_for(shape)
    inputs, targets = (part.numpy().astype(np.int32) for part in (tokens[:, :-1], tokens[:, 1:]))
    ours = new_model(parameters.layout.config, load_kernels("numpy", 1), *inputs.shape)
    ours.parameters.flat[:] = parameters.flat
    logits, loss = expected(model, tokens)
    assert np.abs(logits).max() > 0.5
    assert np.abs(logits_of(ours, inputs) - logits).max() < tolerance
    assert abs(ours.token_losses(inputs, targets).mean() - loss) < tolerance


def load_there(folder):
    """The model that transformers makes of a folder; nothing in it is missing, too much or of another shape."""
    model, info = transformers.GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


def assert_equal_tensors(one, other):
    one, other = one.state_dict(), other.state_dict()
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.dtype == other[name].dtype
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("shard_size", ["5GB", "1KB"])
def test_there_and_back(tmp_path, shape, shard_size):
    """Saved by transformers, loaded here, exported, and loaded there again."""
    model = random_model(shape, seed=7)
    model.save_pretrained(tmp_path / "theirs", max_shard_size=shard_size)
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists() == (shard_size == "1KB")
    parameters = weights.load(tmp_path / "theirs")
    assert_same_model(parameters, model, shape)
    huggingface_export.write_parameters(tmp_path / "ours", parameters)
    assert_equal_tensors(load_there(tmp_path / "ours"), model)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(tmp_path, dtype):
    """Saved in 16 bits, and loaded here as the same values in float32; the bfloat16 export is what torch rounds to."""
    shape = SHAPES["bytes"]
    model = random_model(shape, seed=8).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path / "theirs")
    parameters = weights.load(tmp_path / "theirs")
    assert_same_model(parameters, model.float(), shape)
    huggingface_export.write_parameters(tmp_path / "ours", parameters, stored="bfloat16")
    again = load_there(tmp_path / "ours")
    assert again.dtype == torch.bfloat16
    assert_equal_tensors(again, model.bfloat16())


def test_the_model_without_its_head(tmp_path):
    """GPT2Model saves the names without the prefix."""
    shape = SHAPES["odd"]
    model = random_model(shape, seed=9)
    model.transformer.save_pretrained(tmp_path / "theirs")
    assert_same_model(weights.load(tmp_path / "theirs"), model, shape)


def test_our_model_there(tmp_path):
    """From our initialization through llm.c's file in bfloat16."""
    shape = SHAPES["bytes"]
    config = weights.read_config(saved(tmp_path / "theirs", shape))
    parameters = Parameters.zeros(Layout(config, multiple_of=96))
    initialize(parameters, seed=3)
    llmc.write_parameters(tmp_path / "model.bin", parameters, stored="bfloat16")
    read = weights.load(tmp_path / "model.bin")
    huggingface_export.write_parameters(tmp_path / "ours", read)
    assert_same_model(read, load_there(tmp_path / "ours"), shape)


def saved(folder, shape):
    random_model(shape, seed=1).save_pretrained(folder)
    return folder


def test_generates_there(tmp_path):
    """config.json says enough for greedy generation, and nothing that this vocabulary has not."""
    huggingface_export.write_parameters(tmp_path / "ours", weights.load(saved(tmp_path / "theirs", SHAPES["bytes"])))
    model = load_there(tmp_path / "ours")
    assert model.config.eos_token_id is None
    assert model.generate(torch.tensor([[1, 2]]), max_new_tokens=4, do_sample=False).shape == (1, 6)


def test_a_text_goes_on_there(tmp_path):
    """Model and tokenizer of one folder, as their users load them."""
    parameters = weights.load(saved(tmp_path / "theirs", SHAPES["bytes"]))
    huggingface_export.write_parameters(tmp_path / "ours", parameters, tokenizer=byte_encoding())
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    text = "naïve  東京\n"
    inputs = tokenizer(text, return_tensors="pt")
    assert inputs["input_ids"].tolist() == [list(text.encode())]
    assert tokenizer.decode(inputs["input_ids"][0]) == text
    assert model.generate(**inputs, max_new_tokens=4, do_sample=False).shape == (1, len(text.encode()) + 4)


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("gpt2-")])
def test_the_names_and_shapes_of_each_size(name):
    """Without the numbers: torch makes the model on its meta device."""
    config = PRESETS[name]
    shape = {"n_layer": config.n_layer, "n_head": config.n_head, "n_embd": config.n_embd}
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape))
    theirs = {name: tuple(value.shape) for name, value in model.named_parameters()}
    assert theirs == {f"transformer.{name}": shape for _, name, shape in names_and_shapes(config)}


def test_the_tokenizers_package_gives_them_too(small):  # noqa: F811
    for encoding, folder in (small, (byte_encoding(), None)):
        if folder is None:
            (folder := small[1] / "bytes").mkdir()
            write_tokenizer(folder, encoding, 64)
        theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        for text in TEXTS:
            ids = encoding.encode(text, allowed_special="all")
            assert theirs.encode(text).ids == ids
            assert theirs.decode(ids, skip_special_tokens=False) == text
