"""Folders of Hugging Face's, to be damaged: a reference reader of ten lines says what stands in a file.

A weight has no checksum: another value is another value, and where nothing but weights has changed the file must be
read.
"""

import json
from pathlib import Path

import numpy as np

from gpt2.errors import UserError
from gpt2.formats.huggingface import INDEX, SINGLE
from gpt2.formats.weights import read_config, read_parameters
from gpt2.parameters import Layout, Parameters
from tests.support.mutations import Damaged, Mutator
from tests.support.safetensors_file import CONFIG, assert_holds, gpt2_tensors, pack, write_folder

SHARDS = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def of_json(mutator: Mutator, content: bytes) -> bytes:
    return mutator.of_json(content)


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


def case(folder: Path, name: str, mutate, judge) -> Damaged:
    def content(value):
        return value[0], value[1].flat.tobytes()

    return Damaged(folder / name, mutate, lambda: read(folder), UserError, judge, folder, content, least=0.5)


def tensors(folder: Path, mutate) -> Damaged:
    written = write_folder(folder / "gpt2", gpt2_tensors())
    content = (written / SINGLE).read_bytes()
    begin = header_length(content)

    def judge(mutant, value):
        if value is not None:
            config, parameters = value
            assert config == CONFIG
            assert_holds(parameters, tensors_in(mutant))
        elif mutant[:begin] == content[:begin] and len(mutant) == len(content):
            assert not all(np.isfinite(values).all() for values in tensors_in(mutant).values())

    return case(written, SINGLE, mutate, judge)


def of_tensors(mutator: Mutator, content: bytes) -> bytes:
    return mutator.of_bytes(content, header_length(content))


def config(folder: Path) -> Damaged:
    """The tensors say all of a shape but its heads."""
    written = gpt2_tensors()

    def judge(mutant, value):
        if value is not None:
            found, parameters = value
            said = json.loads(mutant)
            assert [said[name] for name in ("n_layer", "n_embd", "n_positions", "vocab_size")] == [2, 4, 3, 5]
            assert (said["model_type"], said["n_head"]) == ("gpt2", found.n_head)
            assert_holds(parameters, written)

    return case(write_folder(folder / "gpt2", written), "config.json", of_json, judge)


def index(folder: Path) -> Damaged:
    """It says only where the tensors are: those that are read are all of them, whole."""
    written = gpt2_tensors()
    folder = write_folder(folder / "gpt2", written)
    (folder / SINGLE).unlink()
    names = list(written)
    weight_map = {name: SHARDS[number % 2] for number, name in enumerate(names)}
    for shard in SHARDS:
        (folder / shard).write_bytes(pack({name: written[name] for name in names if weight_map[name] == shard}))
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1264}, "weight_map": weight_map}))

    def judge(mutant, value):
        if value is not None:
            assert set(json.loads(mutant)["weight_map"]) <= set(written)
            assert_holds(value[1], written)

    return case(folder, INDEX, of_json, judge)
