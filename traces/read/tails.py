"""Parts of files that grow: what a reader takes of them who looks every few seconds, and must not read gigabytes.

Of records (RUN/traces) that is the end, from the start of a whole step on. Of lines (log.jsonl) it is the end, and
pieces spread evenly over all that comes before it: enough for a curve. A file that is no larger is read as a whole.
All of it may be written meanwhile: the last record, or line, may be there by half.
"""

import os
from pathlib import Path

import numpy as np

from traces.read import checks
from traces.record.phases import INDEX, STEP

LONGEST_HEADER = 1 << 20
PIECES = 64  # of a long log, before its end


def read_records(path, record: np.dtype, parse_header, most_bytes: int | None = None) -> tuple[dict, np.ndarray, bool]:
    """What parse_header makes of the first line; the whole records after it; whether there are more of them before.

    most_bytes: of records at the end of the file; None for all. OSError, and what parse_header raises.
    """
    with open(path, "rb", opener=checks.regular) as file:
        line = file.readline(LONGEST_HEADER)
        size = file.seek(0, 2)
    header = parse_header(line)
    count = (size - len(line)) // record.itemsize
    kept = count if most_bytes is None else min(count, most_bytes // record.itemsize)
    offset = len(line) + (count - kept) * record.itemsize
    return header, np.fromfile(path, record, count=kept, offset=offset), kept < count


def from_a_whole_step(records: np.ndarray) -> np.ndarray:
    """Array of files.RECORD that began somewhere in a step, without what is left of that step.

    A step's own record comes behind those of its phases. Without any, nothing is left: no step is whole.
    """
    ends = np.flatnonzero(records["phase"] == INDEX[STEP])
    return records[ends[0] + 1 :] if len(ends) else records[:0]


def read_lines(path, most_bytes: int | None = None) -> list[bytes]:
    """The complete lines of a file, in order, without their newlines; of a long one about so many bytes of them.

    The half of these bytes are the file's last ones. OSError.
    """
    with open(path, "rb", opener=checks.regular) as file:
        size = os.fstat(file.fileno()).st_size
        if most_bytes is None or size <= most_bytes:
            return file.read().split(b"\n")[:-1]  # what follows the last newline is empty, or torn
        last, lines = size - most_bytes // 2, []
        piece = most_bytes // 2 // PIECES
        for start in np.linspace(0, last - piece, PIECES).astype(int).tolist():
            lines += _whole_lines(file, start, piece)
        return lines + _whole_lines(file, last, size - last)


def _whole_lines(file, start: int, length: int) -> list[bytes]:
    """Of this part of the file, those lines that begin and end in it."""
    begin = max(0, start - 1)  # a line begins at `start` only if the byte before it is a newline
    file.seek(begin)
    lines = file.read(length + start - begin).split(b"\n")
    return lines[1:-1] if start else lines[:-1]


def sizes(folder: Path) -> dict[str, tuple[int, int]]:
    """Of each file in a folder its size and time of change, in ns: equal where nothing was written. {} without it."""
    found = {}
    try:
        for entry in os.scandir(folder):
            status = entry.stat()
            found[entry.name] = status.st_size, status.st_mtime_ns
    except OSError:  # a run that has no traces yet, or moves them away as it is taken up again
        return {}
    return found
