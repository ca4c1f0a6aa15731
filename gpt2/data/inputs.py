"""Find text files, and read their unpacked bytes block by block.

prepare.py, train.py --text and evaluate.py --text use these functions, so they find and read the same files.
"""

import gzip
import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from gpt2.errors import UserError, file_errors

KINDS = (".txt", ".jsonl", ".parquet")
PACKINGS = (".gz", ".zst")
KNOWN = "expected .txt, .jsonl or .parquet, the first two also with .gz or .zst behind it"
EMPTY = "without text"  # why a file is left out
NAMED_AT_MOST = 3  # paths named for each reason to leave them out
BLOCK_BYTES = 1 << 20
PACKED_BYTES = 1 << 16  # bytes of a zstd file that are unpacked at once
LARGEST_ZSTD_WINDOW = 1 << 31  # the window of `zstd --long=31`


class Input(NamedTuple):
    """A file, its kind (one of KINDS) and its packing (one of PACKINGS, or "").

    bytes, changed_ns: its size and the time of its last change, when it was found.
    """

    path: Path
    kind: str
    packing: str
    bytes: int = 0
    changed_ns: int = 0


class Remarks:
    """A one-line remark to the user about the files that were found: which were left out, and why."""

    def __init__(self):
        self._paths: dict[str, dict[str, list[Path]]] = {}

    def add(self, reason: str, path: Path, what: str = "left out") -> None:
        self._paths.setdefault(what, {}).setdefault(reason, []).append(path)

    def __str__(self) -> str:
        """Return text like "left out: 2 hidden (a/.git, a/.b.txt), 1 of unknown extension (a/b.csv)"; "" if empty."""
        parts = (
            f"{what}: " + ", ".join(f"{len(paths)} {reason} ({names_of(paths)})" for reason, paths in reasons.items())
            for what, reasons in self._paths.items()
        )
        return "; ".join(parts)


def names_of(paths: list[Path]) -> str:
    """Return the first paths as one line, with unprintable characters replaced."""
    text = ", ".join(map(str, paths[:NAMED_AT_MOST])) + (", ..." if len(paths) > NAMED_AT_MOST else "")
    return "".join(sign if sign.isprintable() else "?" for sign in text)


def check_unchanged(source: Input) -> None:
    """Raise UserError if the file has changed since it was found: its text may be partly old and partly new."""
    with file_errors(source.path, "expected the file that was there at the start; put it back and start again"):
        status = os.stat(source.path)
    if (status.st_size, status.st_mtime_ns) != (source.bytes, source.changed_ns):
        raise UserError(
            f"{source.path}: {status.st_size} bytes, written to meanwhile, expected the {source.bytes} bytes that were "
            "there at the start: wait until nobody writes to it, and start again"
        )


def find_inputs(paths: list[Path]) -> tuple[list[Input], Remarks]:
    """Return the given files in order, and the files of a given folder at any depth, sorted by path.

    A given file of unknown extension is read as plain text. In a folder, files of known extension are read, links are
    followed, each folder is read once, and hidden files are left out. UserError: missing, not a file, an empty folder.
    """
    found = []
    remarks = Remarks()
    for path in paths:
        if os.path.isdir(path):  # unlike Path.is_dir, no error where permission is missing: file_of reports it
            found += files_of(path, remarks)
        else:
            found.append(file_of(path))
            if not classify(path):
                remarks.add("of unknown extension", path, "read as plain text")
    seen = set()
    for source in found:
        file = source.path.resolve()
        if file in seen:
            remarks.add("given or linked more than once", source.path, "read again")
        seen.add(file)
    return found, remarks


def file_of(path: Path) -> Input:
    with file_errors(path, "expected a file or a folder; check the path and its permissions"):
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{path}: not a file, expected one that can be read twice: write its text to a file")
    found = classify(path)
    if not found and path.suffix.lower() in PACKINGS:
        raise UserError(f"{path}: unknown extension, {KNOWN}: rename it, or link it under the right name")
    found = found or Input(path, ".txt", "")
    if found.kind == ".parquet" and found.packing:
        raise UserError(f"{path}: a packed Parquet file cannot be read, Parquet is packed inside: unpack it first")
    return found._replace(bytes=status.st_size, changed_ns=status.st_mtime_ns)


def files_of(folder: Path, remarks: Remarks) -> list[Input]:
    with file_errors(folder, "check the permissions of the folder and of those in it"):
        found = [file_of(path) for path in sorted(paths_in(folder, remarks)) if is_known_file(path, remarks)]
    if not found:
        others = f" ({remarks})" if str(remarks) else ""
        raise UserError(f"{folder}: nothing to read in this folder{others}, {KNOWN}: give another")
    return found


def paths_in(folder: Path, remarks: Remarks) -> Iterator[Path]:
    """Yield the paths in the folder and below it that are not hidden. Each folder is entered once, even with links."""

    def refuse(error: OSError):
        raise error

    entered = set()
    for place, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        status = os.stat(place)
        if (status.st_dev, status.st_ino) in entered:
            remarks.add("read already under another name", Path(place))
            folders.clear()
            continue
        entered.add((status.st_dev, status.st_ino))
        for name in sorted(name for name in [*folders, *names] if name.startswith(".")):
            remarks.add("hidden", Path(place, name))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(place, name) for name in names if not name.startswith("."))


def is_known_file(path: Path, remarks: Remarks) -> bool:
    """Return whether to read a path found in a folder. If not, a remark says why."""
    if not path.exists():
        remarks.add("a link to nothing", path)
    elif not path.is_file():
        remarks.add("not a file", path)
    elif not classify(path):
        remarks.add("of unknown extension", path)
    else:
        return True
    return False


def classify(path: Path) -> Input | None:
    """Return kind and packing from the path's extensions, in any case; None if they are unknown."""
    inner, packing = os.path.splitext(path.name.lower())
    if packing not in PACKINGS:
        inner = path.name.lower()
        packing = ""
    kind = os.path.splitext(inner)[1]
    return Input(path, kind, packing) if kind in KINDS else None


def bare_name(path: Path) -> str:
    """Return the file's name without the extensions that say how to read it. Links are resolved."""
    name = path.resolve().name
    found = classify(path)
    extension = found.kind + found.packing if found else ""
    return name[: len(name) - len(extension)] if name.lower().endswith(extension) else name


def blocks(source: Input) -> Iterator[bytes]:
    """Yield the file's unpacked bytes in nonempty blocks of about BLOCK_BYTES. UserError: unreadable or damaged."""
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
    """Yield unpacked bytes frame by frame, because zstandard's own reader accepts a truncated file."""
    try:
        import zstandard
    except ImportError as error:
        raise UserError(f"{path}: reading zstd needs the package zstandard: pip install zstandard") from error
    decompressor = zstandard.ZstdDecompressor(max_window_size=LARGEST_ZSTD_WINDOW)
    frame = None
    with open(path, "rb") as file:
        while packed := file.read(PACKED_BYTES):
            while packed:
                frame = frame or decompressor.decompressobj()
                try:
                    yield frame.decompress(packed)
                except zstandard.ZstdError as error:
                    raise UserError(f"{path}: the zstd file is damaged ({error}): write or copy it again") from error
                packed = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
    if frame:
        raise UserError(f"{path}: the zstd file is cut short: write or copy it again")
