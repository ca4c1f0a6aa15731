"""Write a GPT-2 folder that Hugging Face's transformers loads. huggingface.py describes its files."""

import json
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import tiktoken

from gpt2.files import new_file, new_folder
from gpt2.formats.huggingface import INDEX, PREFIX, SINGLE, is_transposed, names_and_shapes
from gpt2.formats.huggingface_config import end_of_text, write_config_file
from gpt2.formats.huggingface_tokenizer import write_generation_config, write_tokenizer
from gpt2.formats.safetensors import make_header, tensor_sizes
from gpt2.formats.stored_numbers import AT_ONCE, write_numbers
from gpt2.parameters import Parameters

SHARD_BYTES = 5_000_000_000


def write_parameters(
    path: Path,
    parameters: Parameters,
    ranges: Iterable[tuple[int, int]] | None = None,
    stored: str = "float32",
    shard_bytes: int = SHARD_BYTES,
    tokenizer: tiktoken.Encoding | None = None,
) -> None:
    """Write float32 parameters in host memory as a folder, in float32 or, rounded, in bfloat16.

    ranges: as in llmc.py. shard_bytes: the most bytes of tensors in one file, unless a tensor is larger. tokenizer:
    unless None, also write its files. The folder appears complete or not at all. UserError: it exists and is not empty,
    or cannot be written.
    """
    layout = parameters.layout
    names = {ours: (PREFIX + name, shape) for ours, name, shape in names_and_shapes(layout.config)}
    files = plan_files(dict(names.values()), stored, shard_bytes)
    with new_folder(path) as folder, ExitStack() as stack:
        places = {}
        for file_name, shapes in files.items():
            file = stack.enter_context(new_file(folder / file_name))
            header, offsets = make_header(shapes, stored)
            file.write(header)
            places |= {name: (file, offset) for name, offset in offsets.items()}
        for start, stop in layout.ranges if ranges is None else ranges:
            for tensor in layout.tensors_in(start, stop):
                name, shape = names[tensor.name]
                file, offset = places[name]
                file.seek(offset)
                view = parameters.view(tensor.name)
                if is_transposed(tensor.name, tensor.shape):
                    write_transposed(file, view, stored)
                else:
                    write_numbers(file, view[: shape[0]], stored)
        if len(files) > 1:
            size = sum(tensor_sizes(dict(names.values()), stored).values())
            weight_map = {name: file_name for file_name, shapes in files.items() for name in shapes}
            index = {"metadata": {"total_size": size}, "weight_map": weight_map}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        write_config_file(folder / "config.json", layout.config, stored)
        write_generation_config(folder / "generation_config.json", end_of_text(layout.config))
        if tokenizer:
            write_tokenizer(folder, tokenizer, layout.config.context)


def plan_files(shapes: dict[str, tuple[int, ...]], stored: str, shard_bytes: int) -> dict[str, dict]:
    """Return {file name: {tensor name: shape}}: tensors in order, each file filled before the next."""
    sizes = tensor_sizes(shapes, stored)
    plan = [{}]
    filled = 0
    for name, shape in shapes.items():
        if plan[-1] and filled + sizes[name] > shard_bytes:
            plan.append({})
            filled = 0
        plan[-1][name] = shape
        filled += sizes[name]
    if len(plan) == 1:
        return {SINGLE: plan[0]}
    return {f"model-{number:05d}-of-{len(plan):05d}.safetensors": part for number, part in enumerate(plan, 1)}


def write_transposed(file, view: np.ndarray, stored: str) -> None:
    """Append a weight (outputs, inputs) as (inputs, outputs)."""
    step = max(1, AT_ONCE // len(view))
    for first in range(0, view.shape[1], step):
        write_numbers(file, np.ascontiguousarray(view[:, first : first + step].T), stored)
