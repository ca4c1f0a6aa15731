"""Damaged folders of Hugging Face's: a thousand mutants of each file are refused with one line, or read as they stand.

As in test_fuzz.py a reference reader of ten lines says what stands in a file. A weight has no checksum: another value
is another value, and where nothing but weights has changed the file must be read.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from gpt2.errors import UserError
from gpt2.formats.huggingface import INDEX, SINGLE
from gpt2.formats.weights import read_config, read_parameters
from gpt2.parameters import Layout, Parameters
from tests.support.mutations import read_mutants
from tests.support.safetensors_file import CONFIG, assert_holds, gpt2_tensors, pack, write_folder

pytestmark = pytest.mark.any_mpi

SHARDS = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def read(folder: Path):
    """(config, parameters) of a folder, as train.py --init reads it."""
    config = read_config(folder)
    parameters = Parameters.zeros(Layout(config))
    parameters.flat[:] = 77.0
    read_parameters(folder, parameters)
    return config, parameters


def header_length(content: bytes) -> int:
    return 8 + int.from_bytes(content[:8], "little")


def tensors_in(content: bytes) -> dict[str, np.ndarray]:
    """The float32 tensors of a safetensors file that is none but right."""
    begin = header_length(content)
    header = json.loads(content[8:begin])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        assert entry["dtype"] == "F32"
        tensors[name] = np.frombuffer(content[begin + start : begin + stop], "<f4").reshape(entry["shape"])
    return tensors


@pytest.mark.parametrize(
    "mutate",
    [
        lambda mutator, content: mutator.of_bytes(content, header_length(content)),
        lambda mutator, content: mutator.of_sized_header(content),
    ],
    ids=["bytes", "header"],
)
def test_a_file_of_tensors(tmp_path, mutate):
    folder, read_at_all = write_folder(tmp_path / "gpt2", gpt2_tensors()), 0
    content = (folder / SINGLE).read_bytes()
    begin = header_length(content)
    for mutant, result in read_mutants(folder / SINGLE, mutate, lambda: read(folder), UserError, folder):
        if result is not None:
            config, parameters = result
            assert config == CONFIG
            assert_holds(parameters, tensors_in(mutant))
            read_at_all += 1
        else:
            assert mutant[:begin] != content[:begin] or len(mutant) != len(content)
    assert read_at_all > 10


def test_a_config(tmp_path):
    """The tensors say all of a shape but its heads."""
    tensors, read_at_all = gpt2_tensors(), 0
    folder = write_folder(tmp_path / "gpt2", tensors)
    path = folder / "config.json"
    for mutant, result in read_mutants(
        path, lambda mutator, content: mutator.of_json(content), lambda: read(folder), UserError, folder
    ):
        if result is not None:
            config, parameters = result
            said = json.loads(mutant)
            assert [said[name] for name in ("n_layer", "n_embd", "n_positions", "vocab_size")] == [2, 4, 3, 5]
            assert (said["model_type"], said["n_head"]) == ("gpt2", config.n_head)
            assert_holds(parameters, tensors)
            read_at_all += 1
    assert read_at_all > 10


@pytest.fixture
def shards(tmp_path):
    """(folder, its tensors): in two files, with an index."""
    tensors = gpt2_tensors()
    folder = write_folder(tmp_path / "gpt2", tensors)
    (folder / SINGLE).unlink()
    names = list(tensors)
    weight_map = {name: SHARDS[number % 2] for number, name in enumerate(names)}
    for shard in SHARDS:
        (folder / shard).write_bytes(pack({name: tensors[name] for name in names if weight_map[name] == shard}))
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1264}, "weight_map": weight_map}))
    return folder, tensors


def test_an_index(shards):
    """It says only where the tensors are: those that are read are all of them, whole."""
    folder, tensors = shards
    read_at_all = 0
    for mutant, result in read_mutants(
        folder / INDEX, lambda mutator, content: mutator.of_json(content), lambda: read(folder), UserError, folder
    ):
        if result is not None:
            assert set(json.loads(mutant)["weight_map"]) <= set(tensors)
            assert_holds(result[1], tensors)
            read_at_all += 1
    assert read_at_all > 10
