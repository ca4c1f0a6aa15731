"""Token shards: files of token ids in llm.c's format, read slice by slice.

The format (llm.c, dev/data/data_common.py), little-endian throughout:

    256 int32   header: [0] = 20240520, [1] = 1, [2] = number of tokens, the rest 0
    uint16      the tokens, to the end of the file
"""

import glob
import os
import resource
import time
from pathlib import Path

import numpy as np

from gpt2.errors import UserError, file_errors
from gpt2.files import replacing
from gpt2.formats.llmc_header import HEADER_BYTES, SHARD_MAGIC, check_size, make_header, read_header

SHARD_VERSION = 1
MAX_TOKEN = np.iinfo(np.uint16).max
MAX_COUNT = np.iinfo(np.int32).max  # the header counts tokens in an int32
START_AGAIN = "and start again, train.py with --resume"


def write_shard(path: Path, tokens) -> None:
    """Write token ids (n,), any integer dtype, as a shard. An existing file is replaced atomically.

    UserError: no tokens, too many for the header, ids beyond uint16, or the file cannot be written.
    """
    tokens = np.asarray(tokens)
    if not 0 < tokens.size <= MAX_COUNT:
        raise UserError(
            f"{path}: {tokens.size} tokens to write, expected 1 to {MAX_COUNT}: give more text, or split it"
        )
    low = int(tokens.min())
    high = int(tokens.max())
    if low < 0 or high > MAX_TOKEN:
        wrong = low if low < 0 else high
        raise UserError(f"{path}: token id {wrong} to write, expected 0 to {MAX_TOKEN}: use a smaller tokenizer")
    with replacing(path) as file:
        file.write(make_header(SHARD_MAGIC, SHARD_VERSION, tokens.size))
        file.write(np.ascontiguousarray(tokens, "<u2"))


class Shard:
    """An open shard: a sequence of tokens whose slices are read from the file.

    A file that is removed or replaced stays readable. A file that is truncated or written to is refused: with a
    memory map the process would end with SIGBUS, or silently read other tokens.
    """

    def __init__(self, path: Path, count: int):
        """Open the shard. count: how many tokens the file holds. OSError: it cannot be opened."""
        self.path = path
        self._count = count
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 (open as long as the shard is)
        self._size, self._changed_ns = self._state()

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, part: slice) -> np.ndarray:
        """Read a slice without a step, at most 2^30 tokens: (n,) uint16, read-only.

        UserError: the file was changed since it was opened, or cannot be read.
        """
        start, stop, _ = part.indices(self._count)
        size = 2 * max(0, stop - start)
        with file_errors(self.path, f"cannot read its tokens: check the disk, {START_AGAIN}"):
            content = os.pread(self._file.fileno(), size, HEADER_BYTES + 2 * start)
            found, changed_ns = self._state()  # after reading, to detect changes during it
        if found != self._size or len(content) < size:
            change = f"{found} bytes, expected the {self._size} that it had when it was opened: it was cut or added to"
            raise UserError(f"{self.path}: {change} meanwhile: put it back, {START_AGAIN}")
        if changed_ns != self._changed_ns:
            at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(changed_ns * 1e-9))
            raise UserError(
                f"{self.path}: written to at {at}, expected it to stay as it was when it was opened: put it back, "
                f"{START_AGAIN}"
            )
        return np.frombuffer(content, "<u2")

    def _state(self) -> tuple[int, int]:
        """Return the file's size in bytes and the time of its last change in ns. Takes half a microsecond."""
        status = os.fstat(self._file.fileno())
        return status.st_size, status.st_mtime_ns


def open_shard(path: Path) -> Shard:
    """Open a shard. UserError: missing, unreadable, not a shard, of another version, or of the wrong size."""
    header, size = read_header(path, SHARD_MAGIC)
    _, version, count = header[:3]
    if version != SHARD_VERSION:
        raise UserError(f"{path}: token shard of version {version}, expected {SHARD_VERSION}: tokenize the text anew")
    if count < 1:
        raise UserError(f"{path}: its header promises {count} tokens, expected at least 1: tokenize the text anew")
    check_size(path, size, HEADER_BYTES + 2 * count, f"{count} tokens")
    with file_errors(path, "cannot open it; with very many shards raise the limit of open files (ulimit -n)"):
        return Shard(path, count)


def open_shards(pattern: str) -> list[Shard]:
    """Open the shards that a path or glob pattern matches, sorted by path. UserError: none, or as in open_shard."""
    paths = shard_paths(pattern)
    if not paths:
        raise UserError(
            f"no file matches {pattern}, expected llm.c token shards (.bin): check --train-data and --val-data"
        )
    allow_open_files(len(paths))
    return [open_shard(path) for path in paths]


def shard_paths(pattern: str) -> list[Path]:
    """Return the paths that a path or glob pattern matches, sorted. An existing path is not taken for a pattern."""
    pattern = os.path.expanduser(pattern)  # the shell leaves ~ in a quoted pattern
    paths = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
    return [Path(path) for path in paths]


def allow_open_files(count: int) -> None:
    """Raise this process's limit of open files to the hard limit: the usual 1,024 may be too few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 2 * count > soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
