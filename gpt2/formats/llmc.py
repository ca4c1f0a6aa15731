"""Read and write llm.c's model checkpoints (.bin).

The format (llm.c, write_model in train_gpt2.py, versions 3 and 5), little-endian throughout:

    256 int32   header: [0] = 20240326, [1] = 3 or 5, [2] = context, [3] = vocabulary V, [4] = layers L, [5] = heads,
                [6] = channels C, [7] = padded vocabulary Vp, the rest 0
    float32 (version 3) or bfloat16 (version 5)
                wte (Vp, C), wpe (context, C), then each kind of layer tensor for all layers, (L, ...), in the order of
                LAYER_TENSORS, then lnf_weight (C,), lnf_bias (C,)

Weights are (outputs, inputs), as here. Only the order differs: here, each layer's tensors are adjacent.
"""

import math
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path

from gpt2.config import GPT2Config
from gpt2.errors import UserError, file_errors
from gpt2.files import replacing
from gpt2.formats.llmc_header import HEADER_BYTES, MODEL_MAGIC, check_size, make_header, read_header
from gpt2.formats.stored_numbers import NUMPY_DTYPES, check_config, fill, read_numbers, write_numbers
from gpt2.model_shards import layer_shapes
from gpt2.parameters import Parameters, no_hook

VERSIONS = {"float32": 3, "bfloat16": 5}
FIRST_VERSION = 1  # float32 without padded vocabulary
HEADER_FIELDS = ("context", "vocab_size", "n_layer", "n_head", "n_embd", "padded_vocab_size")

# Not derived from gpt2.parameters: the order in files must not change with ours.
LAYER_TENSORS = (
    "ln1_weight", "ln1_bias", "qkv_weight", "qkv_bias", "attproj_weight", "attproj_bias",
    "ln2_weight", "ln2_bias", "fc_weight", "fc_bias", "fcproj_weight", "fcproj_bias",
)  # fmt: skip


def read_config(path: Path) -> GPT2Config:
    """Return the model's shape. UserError: missing, not a checkpoint, unsupported version, damaged."""
    return read_shape(path)[0]


def read_parameters(path: Path, parameters: Parameters, filled=no_hook) -> None:
    """Fill `parameters`, as in weights.py. The file's vocabulary may be padded to another multiple."""
    config, padded_vocab_size, stored = read_shape(path)
    check_config(path, config, parameters.layout.config)
    offsets = tensor_offsets(config, padded_vocab_size, stored)

    def read(tensor, first, rows):
        before = first * math.prod(rows.shape[1:])
        file.seek(offsets[tensor.name] + NUMPY_DTYPES[stored].itemsize * before)
        read_numbers(file, rows, stored)

    with file_errors(path, "cannot read the model checkpoint; check the disk"), open(path, "rb") as file:
        fill(parameters, read, filled)


def write_parameters(
    path: Path, parameters: Parameters, ranges: Iterable[tuple[int, int]] | None = None, stored: str = "float32"
) -> None:
    """Write float32 parameters in host memory as a checkpoint of float32 or, rounded, of bfloat16.

    ranges: yields the layout's ranges; each is written before the next is taken, so that parameters need not be in
    memory all at once. An existing file is replaced atomically. UserError: the file cannot be written.
    """
    layout = parameters.layout
    config = layout.config
    numbers = [getattr(config, field) for field in HEADER_FIELDS]
    offsets = tensor_offsets(config, config.padded_vocab_size, stored)
    with replacing(path) as file:
        file.write(make_header(MODEL_MAGIC, VERSIONS[stored], *numbers))
        for start, stop in layout.ranges if ranges is None else ranges:
            for tensor in layout.tensors_in(start, stop):
                file.seek(offsets[tensor.name])
                write_numbers(file, parameters.view(tensor.name), stored)


def tensor_offsets(config: GPT2Config, padded_vocab_size: int, stored: str) -> dict[str, int]:
    """Return {our name: where the tensor begins in the file, in bytes}."""
    C = config.n_embd
    layer = layer_shapes(config)
    shapes = {"wte": (padded_vocab_size, C), "wpe": (config.context, C)}
    for name in LAYER_TENSORS:
        shapes |= {f"layer.{index}.{name}": layer[name] for index in range(config.n_layer)}
    shapes |= {"lnf_weight": (C,), "lnf_bias": (C,)}
    item = NUMPY_DTYPES[stored].itemsize
    stops = accumulate((item * math.prod(shape) for shape in shapes.values()), initial=HEADER_BYTES)
    return dict(zip(shapes, stops, strict=False))


def read_shape(path: Path) -> tuple[GPT2Config, int, str]:
    """Return (the model's shape, wte's rows, type of the numbers), after checking the file's size."""
    header, size = read_header(path, MODEL_MAGIC)
    stored = {version: name for name, version in VERSIONS.items()}.get(header[1])
    if stored is None:
        known = " (float32 without padded vocabulary, llm.c's first format), which is not read"
        raise UserError(
            f"{path}: model checkpoint of version {header[1]}{known if header[1] == FIRST_VERSION else ''}, "
            "expected 3 (float32) or 5 (bfloat16): export it again with llm.c's train_gpt2.py"
        )
    numbers = dict(zip(HEADER_FIELDS, header[2:], strict=False))
    padded_vocab_size = numbers["padded_vocab_size"]
    if min(numbers.values()) < 1 or numbers["n_embd"] % numbers["n_head"] or padded_vocab_size < numbers["vocab_size"]:
        found = ", ".join(f"{name} {value}" for name, value in numbers.items())
        raise UserError(f"{path}: its header says {found}, expected the shape of a GPT-2: export or copy it again")
    del numbers["padded_vocab_size"]
    config = GPT2Config(**numbers)
    count = parameter_count(config, padded_vocab_size)
    check_size(path, size, HEADER_BYTES + NUMPY_DTYPES[stored].itemsize * count, f"{count} {stored} parameters")
    return config, padded_vocab_size, stored


def parameter_count(config: GPT2Config, padded_vocab_size: int) -> int:
    # Not through Layout: a damaged header may ask for billions of layers.
    layer = sum(math.prod(shape) for shape in layer_shapes(config).values())
    return (padded_vocab_size + config.context + 2) * config.n_embd + config.n_layer * layer
