"""GPT-2 folders that must be refused: other architectures, other tensors, damage, files that do not fit together."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from gpt2.errors import UserError
from gpt2.formats.huggingface import read_config, read_parameters
from gpt2.parameters import Layout, Parameters
from tests.support.safetensors_file import CONFIG, gpt2_tensors, pack, write_folder

FIXTURE = Path(__file__).parents[1] / "fixtures" / "huggingface_gpt2"
INDEX = "model.safetensors.index.json"


def refusal(path) -> str:
    """Its line, the same of both functions."""
    with pytest.raises(UserError) as caught:
        read_config(path)
    with pytest.raises(UserError) as again:
        read_parameters(path, Parameters.zeros(Layout(CONFIG)))
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    assert str(again.value) == message
    return message


CONFIGS = {
    "another architecture": ({"model_type": "llama"}, ['"llama"', 'expected "gpt2"']),
    "no architecture": ({"model_type": None}, ["null", 'expected "gpt2"']),
    "no layers": ({"n_layer": None}, ["n_layer null", "whole numbers"]),
    "layers in words": ({"n_layer": "2"}, ['n_layer "2"', "whole numbers"]),
    "true layers": ({"n_layer": True}, ["n_layer true", "whole numbers"]),
    "half a layer": ({"n_layer": 0.5}, ["n_layer 0.5", "whole numbers"]),
    "no context": ({"n_positions": 0}, ["n_positions 0", "at least 1"]),
    "too many tokens": ({"vocab_size": 2**70}, [f"vocab_size {2**70}", "whole numbers"]),
    "heads": ({"n_head": 3}, ["n_embd 4, n_head 3"]),
    "activation": ({"activation_function": "relu"}, ['activation_function "relu"', '"gelu_new"']),
    "epsilon": ({"layer_norm_epsilon": 1e-6}, ["layer_norm_epsilon 1e-06", "1e-05"]),
    "width": ({"n_inner": 12}, ["n_inner 12", "null or 16"]),
    "scale": ({"scale_attn_weights": False}, ["scale_attn_weights false", "expected true"]),
    "layers' scale": ({"scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx true"]),
    "cross attention": ({"add_cross_attention": True}, ["add_cross_attention true"]),
    "billions of layers": ({"n_layer": 2**31 - 1}, ["no tensor h.2.ln_1.weight", f"{2**31 - 1} layers"]),
    "a layer too few": ({"n_layer": 1}, ["'h.1.ln_1.weight' and 11 more", "1 layers"]),
    "vocabulary": ({"vocab_size": 6}, ["wte.weight is [5, 4], expected [6, 4]"]),
    "no head": ({"tie_word_embeddings": False}, ["head is not tied", "no lm_head.weight"]),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_refuses_a_config(tmp_path, case):
    changes, facts = CONFIGS[case]
    message = refusal(write_folder(tmp_path / "gpt2", gpt2_tensors(), **changes))
    assert all(fact in message for fact in facts), message


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe{}", b"[" * 100_000, b"3", b'"x\\ny"'])
def test_refuses_a_config_that_is_not_json(tmp_path, content):
    folder = write_folder(tmp_path / "gpt2", gpt2_tensors())
    (folder / "config.json").write_bytes(content)
    assert "config.json: not a JSON object" in refusal(folder)


def without(name):
    return {key: values for key, values in gpt2_tensors().items() if key != f"transformer.{name}"}


def with_tensor(name, values):
    return gpt2_tensors() | {name: values}


C_ATTN = "transformer.h.1.attn.c_attn.weight"
TENSORS = {
    "none": ({}, ["no tensor wte.weight"]),
    "one missing": (without("h.1.mlp.c_proj.bias"), ["no tensor h.1.mlp.c_proj.bias", "2 layers"]),
    "one more": (with_tensor("score.weight", np.zeros((2, 4), "f4")), ["'score.weight'", "no other heads"]),
    "a strange name": (with_tensor("a\nb" * 200, np.zeros(2, "f4")), ["'a\\nba\\nb"]),
    "not transposed": (with_tensor(C_ATTN, np.zeros((12, 4), "f4")), ["[12, 4], expected [4, 12]"]),
    "one dimension": (with_tensor(C_ATTN, np.zeros(48, "f4")), ["[48], expected [4, 12]"]),
    "float64": (with_tensor(C_ATTN, np.zeros((4, 12), "f8")), ["dtype F64, expected F32, F16, BF16"]),
    "another head": (with_tensor("lm_head.weight", np.zeros((6, 4), "f4")), ["lm_head.weight is [6, 4]"]),
    "twice": (
        with_tensor("wpe.weight", np.zeros((3, 4), "f4")),
        ["has both 'transformer.wpe.weight' and"],
    ),
}


@pytest.mark.parametrize("case", TENSORS)
def test_refuses_other_tensors(tmp_path, case):
    tensors, facts = TENSORS[case]
    message = refusal(write_folder(tmp_path / "gpt2", tensors))
    assert all(fact in message for fact in facts), message


def with_header(text: bytes, length=None) -> bytes:
    return (len(text) if length is None else length).to_bytes(8, "little") + text


def edited(name="transformer.wpe.weight", **changes) -> bytes:
    return pack(gpt2_tensors(), lambda header: header[name].update(changes))


def removed(header):
    del header["transformer.wpe.weight"]


WHOLE = pack(gpt2_tensors())
FILES = {
    "empty": (b"", ["0 bytes"]),
    "seven bytes": (WHOLE[:7], ["7 bytes"]),
    "length beyond the file": (with_header(WHOLE[8:], len(WHOLE)), [f"a header of {len(WHOLE)}"]),
    "largest length": (with_header(WHOLE[8:], 2**64 - 1), [f"a header of {2**64 - 1}"]),
    "no header": (with_header(b""), ["a header of 0 bytes"]),
    "header cut": (WHOLE[:100], ["100 bytes, with a header of"]),
    "truncated": (WHOLE[:-3], ["3 too few", "28 tensors"]),
    "too long": (WHOLE + b"123", ["3 too many"]),
    "git lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", ["git lfs pull"]),
    "html": (b"<!DOCTYPE html><html>" + b" " * 100, ["a header of"]),
    "not json": (with_header(b"{]"), ["not JSON"]),
    "not text": (with_header(b"\xff\xff\xff"), ["not JSON"]),
    "deep": (with_header(b"[" * 100_000), ["not JSON"]),
    "a list": (with_header(b"[1, 2]"), ["not an object"]),
    "a name twice": (with_header(b'{"a": 1, "a": 2}'), ["a name twice"]),
    "no entry": (with_header(b'{"a": 1}'), ["describes 'a' in another way"]),
    "overlap": (edited(data_offsets=[79, 127]), ["'transformer.wte.weight' and 'transformer.wpe.weight' overlap"]),
    "gap": (pack(gpt2_tensors(), removed), ["are 48 bytes apart"]),
    "backwards": (edited(data_offsets=[128, 80]), ["bytes 128 to 80"]),
    "too short": (edited(data_offsets=[80, 124]), ["'transformer.wpe.weight', F32 [3, 4], bytes 80 to 124"]),
    "negative": (edited(data_offsets=[-48, 0]), ["describes 'transformer.wpe.weight' in another way"]),
    "half an offset": (edited(data_offsets=[80.0, 128.0]), ["in another way"]),
    "three offsets": (edited(data_offsets=[80, 100, 128]), ["in another way"]),
    "negative shape": (edited(shape=[-3, -4]), ["in another way"]),
    "endless shape": (edited(shape=[10**30, 4]), ["bytes 80 to 128"]),
    "shape in words": (edited(shape="34"), ["in another way"]),
    "dtype of four bits": (edited(dtype="F4"), ["dtype F4"]),
    "dtype a number": (edited(dtype=32), ["in another way"]),
}


@pytest.mark.parametrize("case", FILES)
def test_refuses_a_damaged_file(tmp_path, case):
    content, facts = FILES[case]
    message = refusal(write_folder(tmp_path / "gpt2", content))
    assert all(fact in message for fact in facts), message


def sharded(folder) -> Path:
    """A copy of the fixture, whose shape is not CONFIG."""
    return shutil.copytree(FIXTURE, folder)


def edit_index(folder, edit):
    index = json.loads((folder / INDEX).read_text())
    edit(index)
    (folder / INDEX).write_text(json.dumps(index))


FILE_NAMES = [3, None, "../model-00001-of-00002.safetensors", "/etc/passwd", "pytorch_model.bin", "a\0.safetensors", ""]


@pytest.mark.parametrize("name", [*FILE_NAMES, "x" * 300 + ".safetensors"])
def test_refuses_an_index_of_other_places(tmp_path, name):
    folder = sharded(tmp_path / "gpt2")
    edit_index(folder, lambda index: index["weight_map"].update({"transformer.wte.weight": name}))
    assert INDEX in refusal(folder)


def test_refuses_files_and_an_index_that_do_not_belong_together(tmp_path):
    folder = sharded(tmp_path / "missing")
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert f"{INDEX}: names model-00002-of-00002.safetensors, which is not there" in refusal(folder)
    folder = sharded(tmp_path / "one of two")
    assert "give the whole model's folder" in refusal(folder / "model-00001-of-00002.safetensors")
    folder = sharded(tmp_path / "twice")
    shutil.copy(folder / "model-00001-of-00002.safetensors", folder / "model-00002-of-00002.safetensors")
    assert "is in two files" in refusal(folder)
    folder = sharded(tmp_path / "named")
    edit_index(folder, lambda index: index["weight_map"].update(other="model-00001-of-00002.safetensors"))
    assert "'other' is not in model-00001-of-00002.safetensors" in refusal(folder)
    folder = sharded(tmp_path / "no map")
    edit_index(folder, lambda index: index.pop("weight_map"))
    assert "no weight_map" in refusal(folder)


def test_refuses_a_folder_without_weights_and_pickles(tmp_path):
    folder = write_folder(tmp_path / "gpt2", gpt2_tensors())
    (folder / "config.json").unlink()
    assert "config.json: No such file" in refusal(folder)
    (folder / "model.safetensors").unlink()
    assert "holds no model.safetensors" in refusal(folder)
    (folder / "pytorch_model.bin").write_bytes(b"PK")
    message = refusal(folder)
    assert "holds pytorch_model.bin" in message
    assert "save_pretrained" in message


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    folder = write_folder(tmp_path / "gpt2", gpt2_tensors())
    parameters, path = Parameters.zeros(Layout(CONFIG)), folder / "model.safetensors"

    def shrink(start, stop):
        path.write_bytes(WHOLE[: len(WHOLE) - 100])

    with pytest.raises(UserError, match=r"model.safetensors: ends \d+ bytes too early: cannot read"):
        read_parameters(folder, parameters, shrink)
