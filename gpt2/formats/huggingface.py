"""Read GPT-2 folders of Hugging Face's transformers. huggingface_export.py writes them.

    config.json                         the model's shape (huggingface_config.py)
    model.safetensors                   all tensors (safetensors.py), or, for a large model:
    model-00001-of-00002.safetensors    a part of the tensors each, and
    model.safetensors.index.json        {"metadata": {"total_size": bytes}, "weight_map": {tensor name: file}}

In these files a layer's matrices are (inputs, outputs) (class Conv1D), here (outputs, inputs); wte is not padded. The
head is the token embedding: a separate lm_head.weight must equal it. Causal masks in old files are skipped. Names may
begin with the names of wrappers around the saved model, as in _orig_mod.transformer.wte.weight.
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from gpt2.config import GPT2Config
from gpt2.errors import UserError, file_errors
from gpt2.formats.huggingface_config import read_config_file, read_json
from gpt2.formats.safetensors import DTYPES, StoredTensor, read_header
from gpt2.formats.stored_numbers import AT_ONCE, NUMPY_DTYPES, check_config, fill, read_numbers
from gpt2.model_shards import layer_shapes
from gpt2.parameters import Parameters, no_hook

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PREFIX = "transformer."
HEAD = "lm_head.weight"
OUTER = {"wte": "wte.weight", "wpe": "wpe.weight", "lnf_weight": "ln_f.weight", "lnf_bias": "ln_f.bias"}
LAYER = {
    "ln1_weight": "ln_1.weight", "ln1_bias": "ln_1.bias",
    "qkv_weight": "attn.c_attn.weight", "qkv_bias": "attn.c_attn.bias",
    "attproj_weight": "attn.c_proj.weight", "attproj_bias": "attn.c_proj.bias",
    "ln2_weight": "ln_2.weight", "ln2_bias": "ln_2.bias",
    "fc_weight": "mlp.c_fc.weight", "fc_bias": "mlp.c_fc.bias",
    "fcproj_weight": "mlp.c_proj.weight", "fcproj_bias": "mlp.c_proj.bias",
}  # fmt: skip
SKIPPED = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)|n_averaged", re.ASCII)  # causal masks; AveragedModel's counter
# Words that wrappers add to names: torch.compile; DataParallel, DDP, DeepSpeed and AveragedModel; FSDP; activation
# checkpointing; Lightning's Fabric; a module with the model as self.model.
WRAPPERS = {
    "_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module", "model"
}  # fmt: skip
FILE_NAME = re.compile(r"[\w.-]{1,200}\.safetensors", re.ASCII)
CONVERT = (
    "a pickle can run any code, so it is never read: convert it where you trust it, with transformers: "
    "GPT2LMHeadModel.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
)


def read_config(path: Path) -> GPT2Config:
    """Return the shape of the model in a folder, or in a .safetensors file beside its config.json.

    UserError: another architecture; a missing, damaged or extra tensor or file; another shape or dtype; a pickle.
    """
    return open_source(path)[0]


def read_parameters(path: Path, parameters: Parameters, filled=no_hook) -> None:
    """Fill `parameters`, as in weights.py. UserError also if the head is not the token embedding."""
    config, tensors, head = open_source(path)
    check_config(path, config, parameters.layout.config)

    def read(tensor, first, rows):
        stored = tensors[tensor.name]
        stop = first + len(rows)
        if is_transposed(tensor.name, tensor.shape):
            for column, theirs in stored_rows(stored, 0, stored.shape[0]):
                rows[:, column : column + len(theirs)] = theirs[:, first:stop].T
        else:
            for row, theirs in stored_rows(stored, first, stop):
                rows[row - first : row - first + len(theirs)] = theirs
        if tensor.name == "wte" and head:
            check_head(head, first, rows)

    fill(parameters, read, filled)


def stored_rows(tensor: StoredTensor, start: int, stop: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield rows [start, stop) of a stored tensor as float32: (first row, some rows), valid until the next."""
    row_shape = tensor.shape[1:]
    row_size = math.prod(row_shape)
    step = max(1, AT_ONCE // row_size)
    buffer = np.empty((min(step, stop - start), *row_shape), np.float32)
    with file_errors(tensor.path, "cannot read the tensors; check the disk"), open(tensor.path, "rb") as file:
        file.seek(tensor.offset + NUMPY_DTYPES[DTYPES[tensor.dtype]].itemsize * start * row_size)
        for first in range(start, stop, step):
            rows = buffer[: min(step, stop - first)]
            read_numbers(file, rows, DTYPES[tensor.dtype])
            yield first, rows


def check_head(head: StoredTensor, start: int, wte: np.ndarray) -> None:
    """Raise a UserError unless the head equals the token embedding, bit by bit, in these rows from `start` on."""
    for first, rows in stored_rows(head, start, start + len(wte)):
        if (rows.view(np.uint32) != wte[first - start : first - start + len(rows)].view(np.uint32)).any():
            raise UserError(
                f"{head.path}: {head.name} is not equal to wte.weight, expected a head tied to the token embedding: "
                "use a model that was trained so"
            )


def is_transposed(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether the tensor with our name is stored transposed (Conv1D) in their files."""
    return name.startswith("layer.") and len(shape) == 2


def names_and_shapes(config: GPT2Config) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield (our name, theirs without prefix, shape there) of each tensor, in our layout's order.

    Does not use Layout, because a config.json may ask for billions of layers.
    """
    shapes = {"wte": (config.vocab_size, config.n_embd), "wpe": (config.context, config.n_embd)}
    yield from ((name, OUTER[name], shape) for name, shape in shapes.items())
    layer = {name: shape[::-1] for name, shape in layer_shapes(config).items()}
    for index in range(config.n_layer):
        yield from ((f"layer.{index}.{name}", f"h.{index}.{LAYER[name]}", shape) for name, shape in layer.items())
    yield from ((name, OUTER[name], (config.n_embd,)) for name in ("lnf_weight", "lnf_bias"))


def open_source(path: Path) -> tuple[GPT2Config, dict[str, StoredTensor], StoredTensor | None]:
    """Return (shape, {our name: tensor}, the head's separate tensor or None), all checked except the values."""
    path = Path(path)
    with file_errors(path, "cannot look into it; check its permissions"):
        is_folder = path.is_dir()
        if is_folder:
            check_holds_tensors(path)
        # Before the tensors: the name of another architecture is the better message.
        config, is_tied = read_config_file((path if is_folder else path.parent) / "config.json")
        stored = read_folder(path) if is_folder else read_header(path)[0]
    found = {}
    for name, tensor in stored.items():
        first = found.setdefault(plain_name(name), tensor)
        if first is not tensor:
            both = f"{first.name[:200]!r} and {name[:200]!r}"
            raise UserError(f"{path}: has both {both}, expected each tensor once: save one model alone")
    tensors = {}
    for ours, name, shape in names_and_shapes(config):
        if name not in found:
            begins = f" (its first is {next(iter(stored))[:200]!r})" if stored else ""
            raise UserError(
                f"{path}: has no tensor {name}{begins}, expected the {config.n_layer} layers that config.json says: "
                "give the whole model's folder"
            )
        tensors[ours] = checked(found.pop(name), shape)
    head = found.pop(HEAD, None)
    if head:
        checked(head, (config.vocab_size, config.n_embd))
    elif not is_tied:
        raise UserError(f"{path}: config.json says that the head is not tied, but there is no {HEAD}: copy it again")
    if extra := [name for name in found if not SKIPPED.fullmatch(name)]:
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise UserError(
            f"{path}: has a tensor {extra[0][:200]!r}{more}, expected a GPT-2 with the {config.n_layer} layers that "
            "config.json says and no other heads: use another model"
        )
    return config, tensors, head


def plain_name(name: str) -> str:
    """Return a tensor's name without wrappers and without transformer's prefix."""
    return ".".join(word for word in name.split(".") if word not in WRAPPERS).removeprefix(PREFIX)


def checked(tensor: StoredTensor, shape: tuple[int, ...]) -> StoredTensor:
    if tensor.shape != shape:
        raise UserError(
            f"{tensor.path}: {tensor.name} is {str(list(tensor.shape))[:200]}, expected {list(shape)} by config.json: "
            "use files that belong together"
        )
    if tensor.dtype not in DTYPES:
        raise UserError(
            f"{tensor.path}: {tensor.name} is of dtype {tensor.dtype}, expected {', '.join(DTYPES)}: "
            "save the model in float32"
        )
    return tensor


def check_holds_tensors(folder: Path) -> None:
    """Raise a UserError that describes the folder's content if it holds no safetensors."""
    if (folder / SINGLE).exists() or (folder / INDEX).exists():
        return
    if pickles := sorted(file.name for file in folder.glob("pytorch_model*.bin")):
        raise UserError(f"{folder}: holds {pickles[0]} and no {SINGLE}; {CONVERT}")
    raise UserError(f"{folder}: holds no {SINGLE} and no {INDEX}: give the folder of a GPT-2 from transformers")


def read_folder(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a folder's single file, or of all files that its index names."""
    if (folder / SINGLE).exists():
        return read_header(folder / SINGLE)[0]
    index = read_index(folder / INDEX)
    tensors = {}
    for name in dict.fromkeys(index.values()):
        if not (folder / name).exists():
            raise UserError(f"{folder / INDEX}: names {name}, which is not there: copy the missing file, too")
        in_file, _ = read_header(folder / name)
        if twice := tensors.keys() & in_file.keys():
            raise UserError(f"{folder}: tensor {min(twice)[:200]!r} is in two files, expected one: copy them again")
        tensors |= in_file
    if missing := [name for name in index if name not in tensors]:
        file_name = index[missing[0]]
        raise UserError(f"{folder / INDEX}: {missing[0][:200]!r} is not in {file_name}: copy both files again")
    return tensors


def read_index(path: Path) -> dict[str, str]:
    """Return {tensor: file name} from an index."""
    files = read_json(path, "the index of a model's files").get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise UserError(f"{path}: has no weight_map of file names by tensor, expected an index: copy it again")
    for name in files.values():
        if not FILE_NAME.fullmatch(name):
            raise UserError(f"{path}: names {name[:200]!r}, expected .safetensors files beside it: copy it again")
    return files
