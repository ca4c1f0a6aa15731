"""A file of flat float32 ranges, each with its checksum: what one rank writes of a checkpoint.

The format is safetensors (https://github.com/huggingface/safetensors), so other programs can look into it:

    8 bytes     length of the header, little-endian
    header      JSON: {"m[0:1048576]": {"dtype": "F32", "shape": [1048576], "data_offsets": [0, 4194304]}, ...,
                "__metadata__": {"m[0:1048576]": "crc32 of label, name and data, in decimal", ...}}
    the data    one range after another, little-endian

A range is named ARRAY[START:STOP], in elements of the whole array; no range is longer than LONGEST, so that a reader of
a part reads and checks little more than that. The checksum of the data goes on from that of `label` and name: a range
that is moved to another place, or a file to another checkpoint, is noticed, too.
"""

import json
import os
import re
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gpt2.errors import UserError
from gpt2.shards import file_errors

LONGEST = 1 << 20  # elements of a range: 4 MiB
LONGEST_HEADER = 100 << 20  # bytes; safetensors' own limit
RANGE = re.compile(r"(\w+)\[(0|[1-9]\d{0,15}):([1-9]\d{0,15})\]", re.ASCII)
METADATA = "__metadata__"


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
    """Write ranges [(array, start, values (n,) float32), ...] to a new file; its bytes, on disk when it returns.

    OSError: it cannot be written.
    """
    pieces = [
        (f"{array}[{start + low}:{start + low + len(values[low : low + LONGEST])}]", values[low : low + LONGEST])
        for array, start, values in ranges
        for low in range(0, len(values), LONGEST)
    ]
    header, offset, checksums = {}, 0, {}
    for name, values in pieces:
        header[name] = {"dtype": "F32", "shape": [len(values)], "data_offsets": [offset, offset + values.nbytes]}
        checksums[name] = str(checksum(label, name, values))
        offset += values.nbytes
    text = json.dumps(header | {METADATA: checksums}).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, values in pieces:
            file.write(values)
        file.flush()
        os.fsync(file.fileno())
    return 8 + len(text) + offset


def checksum(label: str, name: str, values) -> int:
    return zlib.crc32(values, zlib.crc32(f"{label} {name}".encode()))


def read_index(path: Path, size: int) -> list[StoredRange]:
    """The ranges of a file that is to have `size` bytes. UserError: it has not, or is no such file."""
    with file_errors(path, "cannot read it; check the disk"), open(path, "rb") as file:
        found = os.fstat(file.fileno()).st_size
        if found != size:
            raise damaged(path, f"{found} bytes, expected {size}")
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(found - 8, LONGEST_HEADER):
            raise damaged(path, f"a header of {length} bytes")
        text = file.read(length)
    try:
        return sorted(_ranges(path, text, found), key=lambda stored: stored.offset)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise damaged(path, f"its header cannot be understood ({type(error).__name__})") from None


def _ranges(path: Path, text: bytes, size: int) -> list[StoredRange]:
    """From the header's text; any error of a wrong one."""
    header, data = json.loads(text), 8 + len(text)
    checksums = header.pop(METADATA)
    found = []
    for name, entry in header.items():
        array, start, stop = RANGE.fullmatch(name).groups()
        start, stop = int(start), int(stop)
        low, high = entry["data_offsets"]
        fits = type(low) is type(high) is int and low >= 0 and data + high <= size and 0 < stop - start <= LONGEST
        if entry["dtype"] != "F32" or entry["shape"] != [stop - start] or high - low != 4 * (stop - start) or not fits:
            raise ValueError(name)
        found.append(StoredRange(path, array, start, stop, data + low, int(checksums[name])))
    return found


def read_range(stored: StoredRange, label: str) -> np.ndarray:
    """Its values (stop - start,) float32. UserError: it cannot be read, or is not what was written."""
    with file_errors(stored.path, "cannot read it; check the disk"):
        values = np.fromfile(stored.path, "<f4", stored.stop - stored.start, offset=stored.offset)
    if len(values) != stored.stop - stored.start or checksum(label, stored.name, values) != stored.checksum:
        raise damaged(stored.path, f"{stored.name} does not have its checksum")
    return values


def damaged(path: Path, what: str) -> UserError:
    return UserError(f"{path}: {what}: the checkpoint is damaged, use another")
