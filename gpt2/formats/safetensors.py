"""The safetensors file format: a JSON header and named tensors. Unlike a pickle it cannot hold code.

The format (https://github.com/huggingface/safetensors, "Format"), little-endian throughout:

    8 bytes     length of the header, at most 100 MB
    header      JSON: {"NAME": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]}, ...,
                "__metadata__": {"format": "pt"}}, padded with spaces
    the data    the tensors, without gaps or overlaps; data_offsets count from here

The package safetensors is not used: with NumPy it does not read bfloat16, and it writes only tensors that are in memory
all at once.
"""

import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

from gpt2.errors import UserError, file_errors
from gpt2.files import regular
from gpt2.formats.stored_numbers import NUMPY_DTYPES

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
DTYPE_WORD = re.compile(r"\w{1,40}", re.ASCII)  # every dtype of the format matches, also those not read here
CODES = {stored: code for code, stored in DTYPES.items()}
LONGEST_HEADER = 100_000_000
METADATA = "__metadata__"
FOR_PYTORCH = {"format": "pt"}  # PyTorch programs expect it
GIT_LFS = b"version https://git-lfs"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's place in a file: `offset` and `size` in bytes; `dtype` is the format's name, such as BF16."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


def read_header(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return {name: tensor}, in the order of the data, and {name: text} of the metadata. UserError: damaged."""
    advice = "cannot read it; check the path and its permissions"
    with file_errors(path, advice), open(path, "rb", opener=regular) as file:
        size = os.fstat(file.fileno()).st_size
        begin = file.read(len(GIT_LFS))
        if begin == GIT_LFS:
            raise UserError(f"{path}: a pointer of Git LFS, expected the file itself: run git lfs pull")
        length = _header_length(path, begin, size)
        file.seek(8)
        header = file.read(length)
    entries, metadata = _entries(path, header)
    tensors = [_tensor(path, name, entry, 8 + length) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.size))
    _check_cover(path, tensors, 8 + length, size)
    return {tensor.name: tensor for tensor in tensors}, metadata


def make_header(
    shapes: dict[str, tuple[int, ...]], stored: str, metadata: dict[str, str] = FOR_PYTORCH
) -> tuple[bytes, dict[str, int]]:
    """Return a file's first bytes for tensors of these shapes, and the offset of each tensor in the file."""
    header = {METADATA: metadata}
    stop = 0
    for name, shape in shapes.items():
        start = stop
        stop += NUMPY_DTYPES[stored].itemsize * math.prod(shape)
        header[name] = {"dtype": CODES[stored], "shape": list(shape), "data_offsets": [start, stop]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    offsets = {name: begin + header[name]["data_offsets"][0] for name in shapes}
    return len(text).to_bytes(8, "little") + text, offsets


def _header_length(path: Path, begin: bytes, size: int) -> int:
    length = int.from_bytes(begin[:8], "little")
    if size < 8 or length > size - 8:
        raise _damaged(path, f"{size} bytes, with a header of {length if size >= 8 else 8}")
    if not 2 <= length <= LONGEST_HEADER:
        raise _damaged(path, f"a header of {length} bytes, expected 2 to {LONGEST_HEADER}")
    return length


def _entries(path: Path, header: bytes) -> tuple[dict[str, dict], dict[str, str]]:
    """Return the header's {name: entry} of tensors, and its metadata."""
    try:
        names = json.loads(header, object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its header is not JSON ({str(error) or type(error).__name__})") from None
    if not isinstance(names, dict):
        raise _damaged(path, "its header is not an object of tensors by name")
    metadata = names.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise _damaged(path, "its metadata are not texts by name")
    return names, metadata


def _without_repetition(pairs: list) -> dict:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name twice")
    return found


def _tensor(path: Path, name: str, entry, begin: int) -> StoredTensor:
    try:
        dtype = entry["dtype"]
        shape = tuple(entry["shape"])
        start, stop = entry["data_offsets"]
        numbers = (*shape, start, stop)
        if not DTYPE_WORD.fullmatch(dtype) or any(type(number) is not int or number < 0 for number in numbers):
            raise ValueError
    except (TypeError, KeyError, ValueError):
        raise _damaged(path, f"its header describes {name!r} in another way") from None
    if start > stop or (dtype in DTYPES and stop - start != NUMPY_DTYPES[DTYPES[dtype]].itemsize * math.prod(shape)):
        raise _damaged(path, f"its header gives {name!r}, {dtype} {list(shape)}, bytes {start} to {stop}")
    return StoredTensor(path, name, dtype, shape, begin + start, stop - start)


def _check_cover(path: Path, tensors: list[StoredTensor], begin: int, size: int) -> None:
    """Raise a UserError unless tensors follow each other without gaps to the end of the file."""
    stop = begin
    before = "its header"
    for tensor in tensors:
        if tensor.offset != stop:
            what = "overlap" if tensor.offset < stop else f"are {tensor.offset - stop} bytes apart"
            raise _damaged(path, f"{before} and {tensor.name!r} {what}")
        stop = tensor.offset + tensor.size
        before = repr(tensor.name)
    if stop != size:
        difference = f"{abs(stop - size)} too {'few' if size < stop else 'many'}"
        raise _damaged(path, f"{size} bytes, {difference} for its header's {len(tensors)} tensors")


def _damaged(path: Path, what: str) -> UserError:
    what = what if len(what) < 300 else f"{what[:300]}..."
    return UserError(f"{path}: {what}: not a safetensors file, or damaged or still being written: copy it again")
