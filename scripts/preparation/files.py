"""The files that prepare.py reads: which they are, and their bytes, unpacked, without holding a file in memory."""

import gzip
import os
import stat
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from gpt2.errors import UserError, file_errors

KINDS = (".txt", ".jsonl", ".parquet")
PACKINGS = (".gz", ".zst")
KNOWN = "expected .txt, .jsonl or .parquet, the first two also with .gz or .zst behind it"
BLOCK_BYTES = 1 << 20
PACKED_BYTES = 1 << 16  # of a zstd file at a time: what they unpack to is held at once
LARGEST_ZSTD_WINDOW = 1 << 31  # what `zstd --long=31` writes


class Input(NamedTuple):
    """A file, what is in it (one of KINDS), and how it is packed (one of PACKINGS, or an empty text).

    bytes, changed_ns: its size, and when its content was last changed, when it was found.
    """

    path: Path
    kind: str
    packing: str
    bytes: int = 0
    changed_ns: int = 0


class InputChanged(UserError):
    """A file is not what it was when it was found: what was read of it is part old, part new."""


def check_unchanged(source: Input) -> None:
    """InputChanged unless the file has the size and the time of its last change that it had when it was found."""
    with file_errors(source.path, "expected the file that was there at the start; put it back and start again"):
        status = os.stat(source.path)
    if (status.st_size, status.st_mtime_ns) != (source.bytes, source.changed_ns):
        raise InputChanged(
            f"{source.path}: {status.st_size} bytes, written to at {clock(status.st_mtime_ns)}, expected the "
            f"{source.bytes} bytes of {clock(source.changed_ns)}, as at the start: wait until nobody writes to it, and "
            "start again"
        )


def clock(changed_ns: int) -> str:
    """A time since 1970 as a clock shows it, to the millisecond."""
    seconds, rest = divmod(changed_ns, 10**9)
    return f"{time.strftime('%H:%M:%S', time.localtime(seconds))}.{rest // 10**6:03}"


def find_inputs(paths: list[Path]) -> list[Input]:
    """The given files in the given order; of a folder, those of known extension at any depth, sorted by path.

    UserError: missing, no file, an unknown extension, nothing known in a folder.
    """
    return [found for path in paths for found in (files_of(path) if os.path.isdir(path) else [file_of(path)])]


def file_of(path: Path) -> Input:
    with file_errors(path, "expected a file or a folder; check the path and its permissions"):
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{path}: not a file, expected one that can be read twice: write its text to a file")
    found = classify(path)
    if not found:
        raise UserError(f"{path}: unknown extension, {KNOWN}: rename or link it to what it is")
    if found.kind == ".parquet" and found.packing:
        raise UserError(f"{path}: a packed Parquet file cannot be read, Parquet is packed inside: unpack it first")
    return found._replace(bytes=status.st_size, changed_ns=status.st_mtime_ns)


def files_of(folder: Path) -> list[Input]:
    def refuse(error: OSError):
        raise error

    with file_errors(folder, "check the permissions of the folder and of those in it"):
        paths = [Path(place, name) for place, _, names in os.walk(folder, onerror=refuse) for name in names]
    found = [file_of(path) for path in sorted(paths) if classify(path) and path.is_file()]
    if not found:
        raise UserError(f"{folder}: nothing to read in this folder, {KNOWN}: give another")
    return found


def classify(path: Path) -> Input | None:
    """What the path's extensions say, in capitals or not; None where they say nothing."""
    inner, packing = os.path.splitext(path.name.lower())
    if packing not in PACKINGS:
        inner, packing = path.name.lower(), ""
    kind = os.path.splitext(inner)[1]
    return Input(path, kind, packing) if kind in KINDS else None


def bare_name(path: Path) -> str:
    """The path's last part without the extensions that say how to read it."""
    name, found = path.resolve().name, classify(path)
    return name[: len(name) - len(found.kind + found.packing)] if found else name


def blocks(source: Input) -> Iterator[bytes]:
    """The file's bytes, unpacked, about BLOCK_BYTES at a time, never none. UserError: unreadable or damaged."""
    with file_errors(source.path, "expected a sound file that can be read; check its permissions, or write it again"):
        if source.packing and not os.path.getsize(source.path):
            raise UserError(f"{source.path}: 0 bytes, expected a packed file, even of nothing: write or copy it again")
        try:
            if source.packing == ".zst":
                yield from filter(None, zstd_blocks(source.path))
            else:
                with gzip.open(source.path) if source.packing else open(source.path, "rb") as file:
                    while block := file.read(BLOCK_BYTES):
                        yield block
        except (EOFError, zlib.error) as error:
            raise UserError(f"{source.path}: the gzip file is damaged ({error}): write or copy it again") from error


def zstd_blocks(path: Path) -> Iterator[bytes]:
    """Every frame of the file, one by one: zstandard's own reader takes a file cut short for a whole one."""
    try:
        import zstandard
    except ImportError as error:
        raise UserError(f"{path}: reading zstd needs the package zstandard: pip install zstandard") from error
    decompressor, frame = zstandard.ZstdDecompressor(max_window_size=LARGEST_ZSTD_WINDOW), None
    with open(path, "rb") as file:
        while packed := file.read(PACKED_BYTES):
            while packed:
                frame = frame or decompressor.decompressobj()
                try:
                    yield frame.decompress(packed)
                except zstandard.ZstdError as error:
                    raise UserError(f"{path}: the zstd file is damaged ({error}): write or copy it again") from error
                packed, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame:
        raise UserError(f"{path}: the zstd file is cut short: write or copy it again")
