"""A rank's file of a checkpoint: ranges of flat arrays, each with a checksum.

It is a safetensors file (safetensors.py), so other programs can read it. Its metadata hold the checksums:

    {"run": "the number of the start of the run that wrote it", "m[0:1048576]": "crc32 of step, name and data", ...}

A range is named ARRAY[START:STOP], in elements of the whole array. No range is longer than LONGEST, so a reader reads
little more than it needs. The checksum also detects ranges that were moved, and files of another checkpoint. The
run number, which checkpoint.json also has, detects two runs that wrote into one folder.
"""

import os
import re
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gpt2.errors import UserError, file_errors
from gpt2.files import new_file, regular
from gpt2.formats.safetensors import StoredTensor, make_header, read_header

RUN = "run"
LONGEST = 1 << 20  # elements in a range: 4 MiB
AT_ONCE = 1 << 22  # bytes
RANGE = re.compile(r"(\w+)\[(0|[1-9]\d{0,15}):([1-9]\d{0,15})\]", re.ASCII)
RANGE_CHECKSUM = re.compile(r"\d{1,10}", re.ASCII)


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def write_part(folder: Path, step: int, rank: int, ranges, run: str) -> int:
    """Write a rank's ranges [(array, start, values (n,) float32), ...] into a step's .part folder.

    run: the run's number, as in the facts for `complete`. Creates the folder. Returns the file's size, once the file is
    on disk. OSError: the file cannot be written; it is removed.
    """
    pieces = {
        f"{array}[{start + low}:{start + low + len(values[low : low + LONGEST])}]": values[low : low + LONGEST]
        for array, start, values in ranges
        for low in range(0, len(values), LONGEST)
    }
    checksums = {name: str(_range_checksum(step, name, values)) for name, values in pieces.items()}
    shapes = {name: values.shape for name, values in pieces.items()}
    header, _ = make_header(shapes, "float32", {RUN: run} | checksums)
    path = folder / rank_file(rank)
    try:
        folder.mkdir(exist_ok=True)
        with new_file(path) as file:
            file.write(header)
            for values in pieces.values():
                file.write(values)
            return file.tell()
    except OSError:
        path.unlink(missing_ok=True)
        raise


def check_parts(part: Path, facts: dict, files: dict[str, int]) -> None:
    """Raise a UserError unless a .part folder has these files {name: bytes}, all written by the facts' run."""
    for name, size in files.items():
        if name.endswith(".safetensors"):
            read_index(part / name, size, facts[RUN])
        else:
            _check_size(part / name, size)


@dataclass(frozen=True)
class StoredRange:
    """Elements [start, stop) of `array`: the tensor that holds them, and their checksum."""

    array: str
    start: int
    stop: int
    tensor: StoredTensor
    checksum: int


def read_index(path: Path, size: int, run: str) -> list[StoredRange]:
    """Return the ranges of a rank's file. UserError: wrong size, not such a file, or of another run."""
    _check_size(path, size)
    tensors, checksums = read_header(path)
    if checksums.get(RUN) != run:
        found = str(checksums.get(RUN))[:50]
        shown = found if found.isprintable() else ascii(found)
        raise damaged(path, f"written by the run {shown}, expected {run}")
    return [_range(tensor, checksums.get(name, "")) for name, tensor in tensors.items()]


def read_range(stored: StoredRange, step: int) -> np.ndarray:
    """Read a range of the checkpoint of `step`, float32. UserError: unreadable, or changed since it was written."""
    count = stored.stop - stored.start
    tensor = stored.tensor
    with file_errors(tensor.path, "cannot read it; check the disk"):
        values = np.fromfile(tensor.path, "<f4", count, offset=tensor.offset)
    if len(values) != count or _range_checksum(step, tensor.name, values) != stored.checksum:
        raise damaged(tensor.path, f"{tensor.name} does not have its checksum")
    return values


def file_checksum(path: Path) -> int:
    """Return the CRC-32 of a file. OSError: it cannot be read."""
    found = 0
    with open(path, "rb", opener=regular) as file:
        while block := file.read(AT_ONCE):
            found = zlib.crc32(block, found)
    return found


def damaged(path: Path, what: str) -> UserError:
    return UserError(f"{path}: {what}: the checkpoint is damaged, use another")


def _check_size(path: Path, size: int) -> None:
    with file_errors(path, "cannot read it; check the disk"):
        found = os.stat(path).st_size
    if found != size:
        raise damaged(path, f"{found} bytes, expected {size}")


def _range(tensor: StoredTensor, checksum: str) -> StoredRange:
    named = RANGE.fullmatch(tensor.name)
    start = int(named[2]) if named else 0
    stop = int(named[3]) if named else 0
    fits = 0 < stop - start <= LONGEST and tensor.shape == (stop - start,) and tensor.dtype == "F32"
    if not fits or not RANGE_CHECKSUM.fullmatch(checksum):
        raise damaged(tensor.path, f"{tensor.name!r} is not a range with its checksum")
    return StoredRange(named[1], start, stop, tensor, int(checksum))


def _range_checksum(step: int, name: str, values) -> int:
    return zlib.crc32(values, zlib.crc32(f"step {step} {name}".encode()))
