"""Read the ends of growing files. A viewer looks every few seconds and must not read gigabytes.

Only the ends of long files are read: records (RUN/traces) from a whole step on, lines (log.jsonl) from a whole line on.
A run may still write the files, so the last record or line may be incomplete.
"""

import errno
import os
import stat
from pathlib import Path

import numpy as np

from traces.record.phases import INDEX, STEP

LONGEST_HEADER = 1 << 20


def open_regular(path):
    """Open a file for reading. OSError for a pipe or a device, which might block for ever."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return open(path, "rb")


def read_bytes(path) -> bytes:
    with open_regular(path) as file:
        return file.read()


def read_records(path, record: np.dtype, parse_header, most_bytes: int | None = None) -> tuple[dict, np.ndarray, bool]:
    """Return parse_header(first line), the whole records after that line, and whether some were left out.

    most_bytes: read only this many bytes of records, from the end of the file. OSError, and exceptions of parse_header.
    """
    with open_regular(path) as file:
        line = file.readline(LONGEST_HEADER)
        size = file.seek(0, 2)
    header = parse_header(line)
    count = (size - len(line)) // record.itemsize
    kept = count if most_bytes is None else min(count, most_bytes // record.itemsize)
    offset = len(line) + (count - kept) * record.itemsize
    return header, np.fromfile(path, record, count=kept, offset=offset), kept < count


def from_a_whole_step(records: np.ndarray) -> np.ndarray:
    """Drop an incomplete step at the beginning of an array of files.RECORD.

    A step's own record follows the records of its phases. If there is none, no step is whole and nothing is left.
    """
    ends = np.flatnonzero(records["phase"] == INDEX[STEP])
    return records[ends[0] + 1 :] if len(ends) else records[:0]


def read_lines(path, most_bytes: int | None = None) -> list[bytes]:
    """Read the complete lines of a file, in order, without newlines. OSError.

    most_bytes: of a longer file, read only the last lines that fit.
    """
    with open_regular(path) as file:
        size = file.seek(0, 2)
        start = 0 if most_bytes is None else max(0, size - most_bytes)
        file.seek(max(0, start - 1))  # a line begins at `start` only if the byte before it is a newline
        lines = file.read().split(b"\n")
    return lines[1 if start else 0 : -1]  # the rest after the last newline is empty or torn


def sizes(folder: Path) -> dict[str, tuple[int, int]]:
    """Return {name: (size, time of last change in ns)} of a folder's files, to detect writes; {} without a folder."""
    found = {}
    try:
        for entry in os.scandir(folder):
            status = entry.stat()
            found[entry.name] = status.st_size, status.st_mtime_ns
    except OSError:  # the run has no traces yet, or moves them away while it resumes
        return {}
    return found
