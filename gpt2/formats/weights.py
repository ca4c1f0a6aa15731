"""Read the parameters of a GPT-2 in any of these formats:

    model.bin            llm.c's file, float32 or bfloat16 (llmc.py)
    FOLDER               of Hugging Face's transformers, or the .safetensors file in it (huggingface.py)
    RUN                  a run folder: its newest checkpoint; or one of its checkpoints/step-*

Each format's module has read_config and read_parameters; the functions here choose the module. read_parameters
fills `parameters`, float32 in host memory, from a model of the same GPT2Config; wte's pad rows become 0. It calls
filled(start, stop) after each range of the layout.
"""

import os
import re
from pathlib import Path
from types import ModuleType

from gpt2.config import OTHER_NAMES, GPT2Config
from gpt2.errors import UserError, file_errors
from gpt2.formats import checkpoints, huggingface, llmc
from gpt2.parameters import Layout, Parameters, first_not_finite, no_hook

STEP = re.compile(r"step-(\d+)", re.ASCII)
PICKLES = (b"\x80", b"PK\x03\x04")  # the first bytes of torch.save's files: before version 1.6, and since


def read_config(path: Path) -> GPT2Config:
    """Return the model's shape. UserError: nothing readable is there, or it is damaged."""
    form, place = find(path)
    return form.read_config(place)


def read_parameters(path: Path, parameters: Parameters, filled=no_hook) -> None:
    """Fill `parameters`. UserError as in read_config, or if shapes differ, or a parameter is nan or infinite."""
    form, place = find(path)
    checkpoints.check_model(place)

    def checked(start, stop):
        check_finite(place, parameters, start, stop)
        filled(start, stop)

    form.read_parameters(place, parameters, checked)


def check_finite(path: Path, parameters: Parameters, start: int, stop: int) -> None:
    """Raise a UserError about the model at `path` if one of parameters [start, stop) is nan or infinite."""
    values = parameters.flat[start:stop]
    place = first_not_finite(values)
    if place is not None:
        name = parameters.layout.tensor_at(start + place)
        raise UserError(
            f"{path}: holds {values[place]} in {name}, expected finite numbers: its training has diverged, or it is "
            "damaged; take a model from before"
        )


def trained_lengths(path: Path) -> tuple[int, int] | None:
    """Return (sequence length, trained positions of the context) of the run that made the model at `path`.

    More positions are trained if the run began with a model trained on longer sequences. None: the model is not in a
    checkpoint. UserError: nothing is there, or it is damaged.
    """
    form, place = find(path)
    marker = checkpoints.marker_of(place)
    if form is huggingface or not marker:
        return None
    facts = checkpoints.read_marker(marker)
    if "seq_len" not in facts:
        return None
    return facts["seq_len"], facts["trained_positions"]


def load(path: Path) -> Parameters:
    """Read all parameters into new memory, in one process."""
    parameters = Parameters.zeros(Layout(read_config(path)))
    read_parameters(path, parameters)
    return parameters


def files(path: Path) -> list[Path]:
    """Return the files that hold parameters and shape. UserError: nothing readable is there."""
    form, place = find(path)
    if form is llmc:
        return [place]
    with file_errors(place, "cannot look into it; check its permissions"):
        folder = place if place.is_dir() else place.parent
        tensors = sorted(place.glob("*.safetensors*")) if place.is_dir() else [place]
        described = [folder / name for name in ("config.json", checkpoints.MARKER)]
        return [*filter(Path.is_file, described), *filter(Path.is_file, tensors)]


def find(path: Path) -> tuple[ModuleType, Path]:
    """Return the format's module, and the file or folder that it reads."""
    with file_errors(path, "cannot look into it; check its permissions"):
        return _in_folder(Path(path)) if Path(path).is_dir() else _in_file(Path(path))


def _in_folder(path: Path) -> tuple[ModuleType, Path]:
    if (path / "checkpoints").is_dir():
        steps = [place for place in path.glob("checkpoints/step-*") if STEP.fullmatch(place.name) and place.is_dir()]
        if not steps:
            raise UserError(
                f"{path} holds no checkpoints/step-*/model.bin: give a run that ended, or a .bin file or folder of "
                "weights"
            )
        return _in_checkpoint(max(steps, key=lambda place: int(STEP.fullmatch(place.name)[1])))
    if STEP.fullmatch(path.resolve().name) or (path / checkpoints.MARKER).is_file():  # a copy may have any name
        return _in_checkpoint(path)
    if any(path.glob("*.safetensors*")) or any(path.glob("pytorch_model*.bin")):
        return huggingface, path
    source = "is a folder of source code and " if any(path.glob("*.py")) else ""
    raise UserError(
        f"{path} {source}holds no checkpoints/step-*/model.bin, expected those of a run that ended, or "
        f"model.safetensors of a GPT-2 from transformers: {_fetch(path) or 'give such a folder, or a .bin file'}"
    )


def _in_file(path: Path) -> tuple[ModuleType, Path]:
    if path.suffix == ".safetensors":
        if (path.parent / checkpoints.MARKER).is_file():
            raise UserError(f"{path}: a part of a checkpoint, expected the whole: give its folder, {path.parent}")
        return huggingface, path
    if path.name.endswith(".json"):
        raise UserError(f"{path}: describes weights, expected the weights themselves: give its folder, {path.parent}")
    if path.is_file():
        with open(path, "rb") as file:
            begin = file.read(4)
        if begin.startswith(PICKLES):
            raise UserError(f"{path}: a pickle of PyTorch, expected safetensors; {huggingface.CONVERT}")
    elif not os.path.lexists(path):
        advice = _fetch(path) or "check the path"
        raise UserError(
            f"{path}: No such file or folder, expected a run, a folder of Hugging Face's, or llm.c's .bin: {advice}"
        )
    return llmc, path


def _fetch(path: Path) -> str:
    """Return advice if the path names one of Hugging Face's models; "" for other names."""
    if path.name not in OTHER_NAMES:
        return ""
    return (
        f"fetch the weights (hf download openai-community/{path.name} --local-dir weights) and give their folder; the "
        f"shape alone is --model {path.name}"
    )


def _in_checkpoint(folder: Path) -> tuple[ModuleType, Path]:
    """Return the format of the parameters in a checkpoint, and their file or folder."""
    if (folder / checkpoints.MODEL).exists():
        return llmc, folder / checkpoints.MODEL
    if (folder / checkpoints.MARKER).exists():
        return checkpoints, folder
    raise UserError(f"{folder}: holds no model.bin: give a run that ended")
