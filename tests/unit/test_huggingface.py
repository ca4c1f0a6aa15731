"""GPT-2 folders of Hugging Face's transformers: one that it wrote (make_huggingface_fixture.py), others packed by
hand. What is refused: test_huggingface_refusals.py."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gpt2.errors import UserError
from gpt2.formats.huggingface import read_config, read_parameters
from gpt2.kernels import load_kernels
from gpt2.model import new_model
from gpt2.parameters import Layout, Parameters
from tests.support.logits import logits_of
from tests.support.safetensors_file import CONFIG, assert_holds, gpt2_tensors, write_folder

FIXTURE = Path(__file__).parents[1] / "fixtures" / "huggingface_gpt2"


def read(path, multiple_of=1) -> Parameters:
    parameters = Parameters.zeros(Layout(read_config(path), multiple_of))
    parameters.flat[:] = 77.0
    read_parameters(path, parameters)
    return parameters


def test_the_logits_and_loss_of_transformers():
    expected = np.load(FIXTURE / "expected.npz")
    tokens = expected["tokens"].astype(np.int32)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    model = new_model(read_config(FIXTURE), load_kernels("numpy", 1), *inputs.shape)
    read_parameters(FIXTURE, model.parameters)
    assert np.abs(logits_of(model, inputs) - expected["logits"]).max() < 1e-4
    assert model.token_losses(inputs, targets).mean() == pytest.approx(float(expected["loss"]), abs=1e-5)


# As torch.compile, DDP, AveragedModel and Lightning name the tensors of what they wrap.
WRAPPED = ["_orig_mod.", "module.transformer.", "module._orig_mod.transformer.", "_forward_module.model.transformer."]


@pytest.mark.parametrize("prefix", ["", "transformer.", *WRAPPED])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_tensor_of_a_file_packed_by_hand(tmp_path, prefix, dtype):
    tensors = gpt2_tensors(prefix=prefix, dtype=dtype)
    folder = write_folder(tmp_path / "gpt2", tensors)
    for path in (folder, folder / "model.safetensors"):
        assert read_config(path) == CONFIG
        parameters = read(path, multiple_of=7)
        assert_holds(parameters, {name.removeprefix(prefix): values for name, values in tensors.items()})


def test_wrappers_within_a_model(tmp_path):
    """Layers that are compiled, checkpointed or sharded each on its own; a tied head; a count of averaged models."""
    tensors = gpt2_tensors()
    words = ("._orig_mod.attn.", "._checkpoint_wrapped_module.attn.", "._fsdp_wrapped_module.mlp.")
    wrapped = {f"module.{name}": values for name, values in tensors.items()}
    for word in words:
        inner = f".{word.split('.')[2]}."
        wrapped = {name.replace(inner, word, 1) if ".h.1" in name else name: wrapped[name] for name in wrapped}
    assert any("._orig_mod." in name for name in wrapped)
    wrapped |= {"module.lm_head.weight": tensors["transformer.wte.weight"], "n_averaged": np.ones((), "f4")}
    assert_holds(read(write_folder(tmp_path / "gpt2", wrapped)), tensors)


@pytest.mark.parametrize("piece", [1, 5, 17])
def test_tensors_longer_than_a_piece(tmp_path, monkeypatch, piece):
    """A matrix's last rows do not fill a piece."""
    monkeypatch.setattr("gpt2.formats.huggingface.AT_ONCE", piece)
    monkeypatch.setattr("gpt2.formats.stored_numbers.AT_ONCE", piece)
    tensors = gpt2_tensors(dtype="bfloat16")
    assert_holds(read(write_folder(tmp_path / "gpt2", tensors)), tensors)


def test_masks_and_a_tied_head_are_skipped(tmp_path):
    """What files from 2019 hold, and those of programs that know nothing of tied heads."""
    tensors = gpt2_tensors(prefix="")
    extra = {f"h.{layer}.attn.bias": np.ones((1, 1, 3, 3), kind) for layer, kind in ((0, np.uint8), (1, np.float32))}
    extra |= {"h.0.attn.masked_bias": np.array(-1e4, np.float32), "lm_head.weight": tensors["wte.weight"]}
    folder = write_folder(tmp_path / "gpt2", tensors | extra, tie_word_embeddings=False)
    assert_holds(read(folder), tensors)


@pytest.mark.parametrize("place", [0, -1])
def test_refuses_a_head_of_its_own(tmp_path, place):
    tensors = gpt2_tensors()
    head = tensors["transformer.wte.weight"].copy()
    head.flat[place] += 1
    folder = write_folder(tmp_path / "gpt2", tensors | {"lm_head.weight": head})
    with pytest.raises(UserError, match=r"lm_head.weight is not equal to wte.weight, expected a head tied"):
        read(folder)


def test_refuses_another_shape_and_shows_both(tmp_path):
    folder = write_folder(tmp_path / "gpt2", gpt2_tensors())
    other = replace(CONFIG, context=4)
    with pytest.raises(UserError, match=r"context=3.*expected .*context=4"):
        read_parameters(folder, Parameters.zeros(Layout(other)))
