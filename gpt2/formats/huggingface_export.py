"""Write a GPT-2 folder that Hugging Face's transformers loads. huggingface.py describes its files.

All tensors go into one model.safetensors, 6.2 GB of the largest GPT-2.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import tiktoken

from gpt2.files import new_file, new_folder
from gpt2.formats.huggingface import PREFIX, SINGLE, is_transposed, names_and_shapes
from gpt2.formats.huggingface_config import write_config_files
from gpt2.formats.huggingface_tokenizer import write_tokenizer
from gpt2.formats.safetensors import make_header
from gpt2.formats.stored_numbers import AT_ONCE, write_numbers
from gpt2.parameters import Parameters


def write_parameters(
    path: Path,
    parameters: Parameters,
    ranges: Iterable[tuple[int, int]] | None = None,
    stored: str = "float32",
    tokenizer: tiktoken.Encoding | None = None,
) -> None:
    """Write float32 parameters in host memory as a folder, in float32 or, rounded, in bfloat16.

    ranges: as in llmc.py. tokenizer: unless None, also write its files. The folder appears complete or not at all.
    UserError: it exists and is not empty, or cannot be written.
    """
    layout = parameters.layout
    names = {ours: (PREFIX + name, shape) for ours, name, shape in names_and_shapes(layout.config)}
    header, offsets = make_header(dict(names.values()), stored)
    with new_folder(path) as folder:
        with new_file(folder / SINGLE) as file:
            file.write(header)
            for start, stop in layout.ranges if ranges is None else ranges:
                for tensor in layout.tensors_in(start, stop):
                    name, shape = names[tensor.name]
                    file.seek(offsets[name])
                    view = parameters.view(tensor.name)
                    if is_transposed(tensor.name, tensor.shape):
                        write_transposed(file, view, stored)
                    else:
                        write_numbers(file, view[: shape[0]], stored)
        write_config_files(folder, layout.config, stored)
        if tokenizer:
            write_tokenizer(folder, tokenizer, layout.config.context)


def write_transposed(file, view: np.ndarray, stored: str) -> None:
    """Append a weight (outputs, inputs) as (inputs, outputs)."""
    step = max(1, AT_ONCE // len(view))
    for first in range(0, view.shape[1], step):
        write_numbers(file, np.ascontiguousarray(view[:, first : first + step].T), stored)
