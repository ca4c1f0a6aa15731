"""Parameters in files: float32, float16 or bfloat16, little-endian. In memory they are float32.

Reading is exact. Writing bfloat16 rounds to nearest, ties to even; numbers that are too large become infinite.
"""

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np

from gpt2.config import GPT2Config
from gpt2.errors import UserError
from gpt2.model_shards import as_kernels_see
from gpt2.parameters import Parameters, no_hook

NUMPY_DTYPES = {"float32": np.dtype("<f4"), "float16": np.dtype("<f2"), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
WRITTEN = ("float32", "bfloat16")
AT_ONCE = 1 << 18  # numbers that are converted at once, so that the buffer stays in cache


def fill(parameters: Parameters, read: Callable, filled=no_hook) -> None:
    """Fill float32 parameters in host memory, range by range of the layout; filled(start, stop) follows each.

    read(tensor, first, rows) fills `rows` with a tensor's rows, as the kernels see it, from row `first` on. A model
    shard that holds rows of a tensor reads only these. If it holds another box, it reads the whole tensor. The
    pad rows of wte are set to 0.
    """
    layout = parameters.layout
    for start, stop in layout.held_ranges:
        for tensor in layout.tensors_in(start, stop):
            view = parameters.view(tensor.name)
            if tensor.is_rows:
                first = tensor.box[0][0]
                known = max(0, layout.config.vocab_size - first) if tensor.name == "wte" else len(view)
                view[known:] = 0.0
                read(tensor, first, view[:known])
            else:
                whole = np.empty(as_kernels_see(tensor.name, tensor.whole_shape), np.float32)
                read(tensor, 0, whole)
                view[:] = whole.reshape(tensor.whole_shape)[tensor.slices].reshape(tensor.shape)
        filled(start, stop)


def check_config(path: Path, found: GPT2Config, expected: GPT2Config) -> None:
    """Raise a UserError unless the model at `path` has the expected shape."""
    if found != expected:
        raise UserError(f"{path}: holds {found}, expected {expected}: choose its --model, or give another model")


def read_numbers(file, out: np.ndarray, stored: str) -> None:
    """Fill `out`, contiguous float32, with numbers of type `stored` from the binary file's current position.

    OSError: the file ends too early.
    """
    flat = out.reshape(-1)
    buffer = np.empty(min(flat.size, AT_ONCE), NUMPY_DTYPES[stored])
    for start in range(0, flat.size, AT_ONCE):
        part = flat[start : start + AT_ONCE]
        numbers = buffer[: part.size]
        count = file.readinto(numbers.view(np.uint8))  # as bytes: Python's buffers have no bfloat16
        if count != numbers.nbytes:
            raise OSError(f"ends {numbers.nbytes - count} bytes too early")
        part[:] = numbers


def write_numbers(file, values: np.ndarray, stored: str) -> None:
    """Append contiguous float32 values of any shape to a binary file as numbers of type `stored`, one of WRITTEN."""
    flat = values.reshape(-1)
    for start in range(0, flat.size, AT_ONCE):
        part = flat[start : start + AT_ONCE]
        with np.errstate(over="ignore", invalid="ignore"):  # overflow and NaN are expected
            file.write(part.astype(NUMPY_DTYPES[stored], copy=False).view(np.uint8))
