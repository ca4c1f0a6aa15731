"""A file of flat float32 ranges, each with its checksum: what one rank writes of a checkpoint.

The format is safetensors (safetensors.py), so other programs can look into it; its metadata hold the checksums:

    {"m[0:1048576]": "crc32 of label, name and data, in decimal", ...}

A range is named ARRAY[START:STOP], in elements of the whole array. No range is longer than LONGEST, so that a reader of
a part reads and checks little more than it needs. The checksum is of `label`, name and data, in that order: so it also
shows when a range was moved to another place, or a file to another checkpoint.
"""

import os
import re
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gpt2.errors import UserError, file_errors
from gpt2.files import new_file
from gpt2.formats.safetensors import StoredTensor, make_header, read_header

LONGEST = 1 << 20  # elements of a range: 4 MiB
RANGE = re.compile(r"(\w+)\[(0|[1-9]\d{0,15}):([1-9]\d{0,15})\]", re.ASCII)
CHECKSUM = re.compile(r"\d{1,10}", re.ASCII)


@dataclass(frozen=True)
class StoredRange:
    """Elements [start, stop) of `array` at `offset` of the file at `path`, with the checksum of label, name, data."""

    path: Path
    array: str
    start: int
    stop: int
    offset: int
    checksum: int

    @property
    def name(self) -> str:
        return f"{self.array}[{self.start}:{self.stop}]"


def write_ranges(path: Path, label: str, ranges) -> int:
    """Write ranges [(array, start, values (n,) float32), ...] to a new file; returns its bytes when it is on disk.

    OSError: it cannot be written.
    """
    pieces = {
        f"{array}[{start + low}:{start + low + len(values[low : low + LONGEST])}]": values[low : low + LONGEST]
        for array, start, values in ranges
        for low in range(0, len(values), LONGEST)
    }
    checksums = {name: str(checksum(label, name, values)) for name, values in pieces.items()}
    header, _ = make_header({name: values.shape for name, values in pieces.items()}, "float32", checksums)
    with new_file(path) as file:
        file.write(header)
        for values in pieces.values():
            file.write(values)
        return file.tell()


def checksum(label: str, name: str, values) -> int:
    return zlib.crc32(values, zlib.crc32(f"{label} {name}".encode()))


def read_index(path: Path, size: int) -> list[StoredRange]:
    """The ranges of a file. UserError: it has not `size` bytes, or is no such file."""
    with file_errors(path, "cannot read it; check the disk"):
        found = os.stat(path).st_size
    if found != size:
        raise damaged(path, f"{found} bytes, expected {size}")
    tensors, checksums = read_header(path)
    return [_range(tensor, checksums.get(name, "")) for name, tensor in tensors.items()]


def _range(tensor: StoredTensor, text: str) -> StoredRange:
    named = RANGE.fullmatch(tensor.name)
    start, stop = (int(named[2]), int(named[3])) if named else (0, 0)
    fits = 0 < stop - start <= LONGEST and tensor.shape == (stop - start,) and tensor.dtype == "F32"
    if not fits or not CHECKSUM.fullmatch(text):
        raise damaged(tensor.path, f"{tensor.name!r} is no range with its checksum")
    return StoredRange(tensor.path, named[1], start, stop, tensor.offset, int(text))


def read_range(stored: StoredRange, label: str) -> np.ndarray:
    """A range's values (stop - start,) float32. UserError: they cannot be read, or are not what was written."""
    with file_errors(stored.path, "cannot read it; check the disk"):
        values = np.fromfile(stored.path, "<f4", stored.stop - stored.start, offset=stored.offset)
    if len(values) != stored.stop - stored.start or checksum(label, stored.name, values) != stored.checksum:
        raise damaged(stored.path, f"{stored.name} does not have its checksum")
    return values


def damaged(path: Path, what: str) -> UserError:
    return UserError(f"{path}: {what}: the checkpoint is damaged, use another")
