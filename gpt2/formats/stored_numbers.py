"""Parameters as files hold them: float32, float16 or bfloat16, little-endian. In memory they are float32.

Reading is exact. Writing bfloat16 rounds to the nearest, ties to even; what is too large becomes infinite.
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
AT_ONCE = 1 << 18  # numbers that are converted at once: what they need beside the file stays small, and in cache


def fill(parameters: Parameters, read: Callable, filled=no_hook) -> None:
    """Fill float32 parameters in host memory, one range of the layout after another; filled(start, stop) follows each.

    read(tensor, first, rows) fills rows number `first` and on of a tensor as the kernels see it. A shard that has rows
    of a tensor reads these alone; of one that is cut otherwise it reads all, and keeps its box. wte's pad rows become 0
    and are not read.
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
    """UserError unless the model at `path` has the expected shape."""
    if found != expected:
        raise UserError(f"{path}: holds {found}, expected {expected}: choose its --model, or give another model")


def read_numbers(file, out: np.ndarray, stored: str) -> None:
    """Fill `out`, contiguous float32 of any shape, with numbers of type `stored` from where the binary file stands.

    OSError: the file ends before.
    """
    flat = out.reshape(-1)
    buffer = np.empty(min(flat.size, AT_ONCE), NUMPY_DTYPES[stored])
    for start in range(0, flat.size, AT_ONCE):
        part = flat[start : start + AT_ONCE]
        numbers = buffer[: part.size]
        count = file.readinto(numbers.view(np.uint8))  # as bytes: Python's buffers know no bfloat16
        if count != numbers.nbytes:
            raise OSError(f"ends {numbers.nbytes - count} bytes too early")
        part[:] = numbers


def write_numbers(file, values: np.ndarray, stored: str) -> None:
    """Append contiguous float32 values of any shape to a binary file as numbers of type `stored`, one of WRITTEN."""
    flat = values.reshape(-1)
    for start in range(0, flat.size, AT_ONCE):
        part = flat[start : start + AT_ONCE]
        with np.errstate(over="ignore", invalid="ignore"):  # too large becomes infinite, and a NaN stays one
            file.write(part.astype(NUMPY_DTYPES[stored], copy=False).view(np.uint8))
