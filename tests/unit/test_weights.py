"""Whatever holds weights, by its path; exports of them (scripts/export.py); memory that is too small."""

import json
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from gpt2.errors import UserError
from gpt2.formats import checkpoint_files, checkpoints, llmc, weights
from gpt2.parameters import Layout, Parameters, initialize
from scripts import export as export_script
from scripts import sample as sample_script
from scripts.settings.memory import check_parameters
from tests.support.refusal import refusal
from tests.support.safetensors_file import CONFIG, assert_holds, gpt2_tensors, write_folder

EXPORT = Path(__file__).parents[2] / "scripts" / "export.py"


def new_parameters(seed=1, config=CONFIG) -> Parameters:
    parameters = Parameters.zeros(Layout(config))
    initialize(parameters, seed)
    return parameters


def new_run(folder, *seeds) -> Path:
    """A run folder with a checkpoint a seed, 100 steps apart, and one that was not finished."""
    for index, seed in enumerate(seeds):
        step = folder / "checkpoints" / f"step-{100 * index:08d}"
        step.mkdir(parents=True)
        llmc.write_parameters(step / "model.bin", new_parameters(seed))
    part = folder / "checkpoints" / "step-99999999.part"
    part.mkdir(parents=True)
    (part / "model.bin").touch()
    (folder / "config.json").write_text(json.dumps({"settings": {}}))
    return folder


def test_a_run_is_its_newest_checkpoint(tmp_path):
    run = new_run(tmp_path / "run", 1, 2, 3)
    assert weights.read_config(run) == CONFIG
    assert (weights.load(run).flat == new_parameters(3).flat).all()
    assert (weights.load(run / "checkpoints" / "step-00000100").flat == new_parameters(2).flat).all()
    assert (weights.load(run / "checkpoints" / "step-00000000" / "model.bin").flat == new_parameters(1).flat).all()


def complete(part, parameters, model=None, **facts) -> Path:
    """A checkpoint of step 7 in pieces, with model.bin if there is a `model`."""
    part.parent.mkdir(parents=True, exist_ok=True)
    ranges = [(name, 0, parameters.flat[: parameters.layout.count]) for name in checkpoints.STATE]
    files = {"rank-00000.safetensors": checkpoint_files.write_part(part, 7, 0, ranges, "run")}
    if model:
        llmc.write_parameters(part / "model.bin", model)
        facts["model_crc32"] = zlib.crc32((part / "model.bin").read_bytes())
    return checkpoints.complete(
        part, {"run": "run", "step": 7} | facts | checkpoints.model_facts(Layout(CONFIG)), files
    )


def test_a_checkpoint_under_another_name(tmp_path):
    """A copy, and links to its file: the same parameters, and the same facts about them."""
    parameters = new_parameters()
    written = complete(tmp_path / "step-00000007.part", parameters, seq_len=3, trained_positions=3)
    copy = written.rename(tmp_path / "best")
    assert (weights.load(copy).flat == parameters.flat).all()
    llmc.write_parameters(tmp_path / "elsewhere.bin", parameters)
    (copy / "model.bin").symlink_to(tmp_path / "elsewhere.bin")
    for path in (copy, copy / "model.bin"):
        assert weights.trained_lengths(path) == (3, 3)
    (copy / "model.bin").unlink()
    (tmp_path / "elsewhere.bin").rename(copy / "model.bin")
    (tmp_path / "to-it.bin").symlink_to(copy / "model.bin")
    assert weights.trained_lengths(tmp_path / "to-it.bin") == (3, 3)


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[1030] ^= 1  # of the first number behind the header
    path.write_bytes(content)


def test_a_checkpoint_s_model_that_is_damaged(tmp_path):
    """Refused, wherever it is named; without it the same parameters are read from the rank's file beside it."""
    parameters = new_parameters()
    step = complete(tmp_path / "run" / "checkpoints" / "step-00000007.part", parameters, parameters)
    assert (weights.load(tmp_path / "run").flat == parameters.flat).all()
    (tmp_path / "link.bin").symlink_to(step / "model.bin")
    flip_a_bit(step / "model.bin")
    for path in (tmp_path / "run", step, step / "model.bin", tmp_path / "link.bin"):
        assert "model.bin: does not have the checksum in checkpoint.json" in refusal(weights.load, path)
    assert f"a part of a checkpoint, expected the whole: give its folder, {step}" in refusal(
        weights.load, step / "rank-00000.safetensors"
    )
    (step / "model.bin").rename(tmp_path / "model.bin")
    assert not (weights.load(tmp_path / "model.bin").flat == parameters.flat).all(), "nothing is known of it there"
    assert (weights.load(tmp_path / "run").flat == parameters.flat).all()


def test_a_folder_and_a_file_of_safetensors(tmp_path):
    folder = write_folder(tmp_path / "gpt2", gpt2_tensors())
    for path in (folder, folder / "model.safetensors", str(folder)):
        assert_holds(weights.load(path), gpt2_tensors())


def test_refuses_what_holds_no_weights(tmp_path):
    assert "holds no checkpoints" in refusal(weights.load, tmp_path)
    (tmp_path / "model.py").write_text("")
    assert f"{tmp_path} is a folder of source code and holds no checkpoints" in refusal(weights.load, tmp_path)
    assert refusal(weights.load, tmp_path / "absent").endswith(
        "expected a run, a folder of Hugging Face's, or llm.c's .bin: check the path"
    )
    assert "holds no checkpoints" in refusal(weights.load, new_run(tmp_path / "run"))
    (tmp_path / "text.bin").write_text("To be, or not to be" * 100)
    assert "expected 20240326" in refusal(weights.load, tmp_path / "text.bin")
    folder = write_folder(tmp_path / "gpt2", gpt2_tensors())
    assert "give its folder" in refusal(weights.load, folder / "config.json")
    llmc.write_parameters(folder / "other.safetensors", new_parameters())
    assert "not a safetensors file" in refusal(weights.load, folder / "other.safetensors")


@pytest.mark.parametrize("content", [b"\x80\x02}q\x00.", b"PK\x03\x04rest of a zip file"])
def test_a_pickle_is_not_read(tmp_path, content):
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(content)
    for place in (path, tmp_path):
        message = refusal(weights.load, place)
        assert "pickle" in message
        assert "save_pretrained" in message


def test_refuses_a_model_larger_than_the_memory(tmp_path, monkeypatch):
    path = tmp_path / "model.bin"
    llmc.write_parameters(path, new_parameters())
    needed = 4 * Layout(CONFIG).count
    monkeypatch.setattr("scripts.settings.memory.available_bytes", lambda: needed)
    check_parameters(path, CONFIG)
    monkeypatch.setattr("scripts.settings.memory.available_bytes", lambda: needed - 1)
    monkeypatch.setattr(Parameters, "zeros", None)  # nothing is allocated before
    flags = export_script.parse([str(path), "--format", "llmc", "--out", str(tmp_path / "out")])
    assert "parameters take 0.0 GB" in refusal(export_script.export, flags)
    assert "parameters take 0.0 GB" in refusal(sample_script.begin, sample_script.parse([str(path)]))
    huge = replace(CONFIG, n_embd=2**20)
    monkeypatch.setattr("scripts.settings.memory.available_bytes", lambda: 10**9)
    with pytest.raises(UserError, match=r"take 1055\d{2}\.\d GB of memory .* expected at most the 1\.0 GB"):
        check_parameters(path, huge)


def export(*arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, str(EXPORT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_exports_of_a_run_and_back(tmp_path):
    """To a folder, from there to llm.c's bfloat16."""
    run, folder, path = new_run(tmp_path / "run", 1, 2), tmp_path / "gpt2", tmp_path / "model.bin"
    result = export(run, "--format", "huggingface", "--out", folder)
    assert result.returncode == 0, result.stderr
    names = sorted(file.name for file in folder.iterdir())
    assert result.stdout.split() == [str(folder / name) for name in names]
    assert names == ["config.json", "generation_config.json", "model.safetensors"]
    assert "without the tokenizer's files" in result.stderr, "no tokenizer has so many tokens"
    assert (weights.load(folder).flat == new_parameters(2).flat).all()
    result = export(folder, "--format", "llmc", "--dtype", "bfloat16", "--out", path)
    assert result.returncode == 0, result.stderr
    rounded = new_parameters(2).flat.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert (weights.load(path).flat == rounded).all()
    result = export(path, "--format", "huggingface", "--out", folder)
    assert result.returncode == 2
    assert result.stderr.startswith(f"export.py: error: {folder}: exists already")
    assert result.stderr.count("\n") == 1


BAD_FLAGS = {
    "dtype of a trace": (["--format", "paraver", "--dtype", "bfloat16"], "--dtype with --format paraver"),
    "tokenizer of llm.c's": (["--format", "llmc", "--tokenizer", "gpt2"], "--tokenizer with --format llmc"),
    "no run": (["--format", "llmc"], "holds no checkpoints"),
}


@pytest.mark.parametrize("case", BAD_FLAGS)
def test_export_refuses(tmp_path, case):
    flags, fact = BAD_FLAGS[case]
    result = export(tmp_path, *flags, "--out", tmp_path / "out")
    assert result.returncode == 2
    assert fact in result.stderr.splitlines()[-1]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["gpt2", "gpt2-xl"])
def test_a_name_of_hugging_face_is_no_folder_of_weights(tmp_path, name):
    """Whether there is such a folder, as gpt2/ of this project's sources, or not."""
    (tmp_path / "there" / name).mkdir(parents=True)
    for path in (tmp_path / "there" / name, tmp_path / "openai-community" / name):
        said = refusal(weights.load, path)
        assert f"hf download openai-community/{name} --local-dir weights" in said
        assert said.endswith(f"--model {name}")
