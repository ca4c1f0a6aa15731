"""Token shards: files of token ids in llm.c's format, read through the page cache and never loaded whole.

The format (llm.c, dev/data/data_common.py), little-endian throughout:

    256 int32   header: [0] = 20240520, [1] = 1, [2] = number of tokens, the rest 0
    uint16      the tokens, to the end of the file

Reading a header and replacing a file in one go serve llm.c's model checkpoint (gpt2/formats/llmc.py), too.
"""

import glob
import os
import stat
import uuid
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from gpt2.errors import UserError

HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS
SHARD_MAGIC, SHARD_VERSION = 20240520, 1
MODEL_MAGIC = 20240326
TEMPORARY = ".*.tmp"  # what `replacing` writes, before it has its name
MAX_TOKEN = np.iinfo(np.uint16).max
MAX_COUNT = np.iinfo(np.int32).max  # the header counts tokens in an int32

# What llm.c's files say they are: a wrong file usually is one of its neighbours.
KNOWN_FILES = {
    SHARD_MAGIC: "an llm.c token shard: give it to --train-data or --val-data",
    MODEL_MAGIC: "an llm.c model checkpoint: give it to --init",
    20240327: "llm.c's debug state: give a token shard or a model checkpoint instead",
    20240328: "llm.c's tokenizer: it is not needed here, choose one with --tokenizer",
    20240522: "an llm.c multiple-choice evaluation: give it to evaluate.py --hellaswag",
    20240801: "a Llama 3 token shard (uint32): tokenize the text anew with --tokenizer gpt2 or bytes",
}


@contextmanager
def file_errors(path, advice: str):
    """Turn any OSError of the block into a UserError about `path`, ending in `advice`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}: {advice}") from error


@contextmanager
def replacing(path: Path):
    """A binary file to write, which takes `path`'s place when the block ends well and disappears otherwise.

    Readers see the old file or the whole new one. An OSError (disk full, no permission) becomes a UserError.
    """
    path = Path(path)
    # Not tempfile: its files can be read by their owner alone. The name is unique among nodes that share a disk.
    temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
    with file_errors(path, "cannot write it: choose a folder that exists, is writable and has room"):
        try:
            with open(temporary, "xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def make_header(*numbers: int) -> np.ndarray:
    """The header (256,) int32 that begins with `numbers`, the rest 0."""
    header = np.zeros(HEADER_INTS, "<i4")
    header[: len(numbers)] = numbers
    return header


def read_header(path: Path, magic: int) -> tuple[list[int], int]:
    """The 256 numbers of a file's header, and the file's size in bytes. UserError: unreadable, another `magic`."""
    expected = KNOWN_FILES[magic].split(":")[0]
    with file_errors(path, f"expected {expected}; check the path and its permissions"):
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{path}: not a file, expected {expected}: give the path of a file")
        header = np.fromfile(path, "<i4", count=HEADER_INTS)
    if status.st_size < HEADER_BYTES or header.size < HEADER_INTS:
        found = f"ends after {status.st_size} bytes" if status.st_size else "is empty"
        raise UserError(
            f"{path}: {found}, expected {expected}, with a header of {HEADER_BYTES} bytes: write or copy it again"
        )
    if header[0] != magic:
        hint = KNOWN_FILES.get(int(header[0]), "unknown: check the path, or write the file again")
        raise UserError(f"{path}: begins with {header[0]}, expected {magic} of {expected}; this is {hint}")
    return header.tolist(), status.st_size


def check_size(path: Path, size: int, expected: int, contents: str) -> None:
    """UserError unless the file's size in bytes is what its header promises."""
    if size != expected:
        difference = f"{abs(expected - size)} too {'few' if size < expected else 'many'}"
        raise UserError(
            f"{path}: {size} bytes, {difference}: its header promises {contents}, {expected} bytes: "
            "the file is damaged or still being written, write or copy it again"
        )


def write_shard(path: Path, tokens) -> None:
    """Write token ids (n,), any integer dtype, as a shard; an existing file is replaced whole or not at all.

    UserError: no tokens, too many for the header, ids beyond uint16, or the file cannot be written.
    """
    tokens = np.asarray(tokens)
    if not 0 < tokens.size <= MAX_COUNT:
        raise UserError(
            f"{path}: {tokens.size} tokens to write, expected 1 to {MAX_COUNT}: give more text, or split it"
        )
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high > MAX_TOKEN:
        wrong = low if low < 0 else high
        raise UserError(f"{path}: token id {wrong} to write, expected 0 to {MAX_TOKEN}: use a smaller tokenizer")
    with replacing(path) as file:
        file.write(make_header(SHARD_MAGIC, SHARD_VERSION, tokens.size))
        file.write(np.ascontiguousarray(tokens, "<u2"))


def open_shard(path: Path) -> np.memmap:
    """A shard's tokens (n,) uint16, read-only, mapped and not loaded; `.filename` is its path.

    UserError: missing, unreadable, not a shard, another version, or a size that its header contradicts.
    """
    header, size = read_header(path, SHARD_MAGIC)
    _, version, count = header[:3]
    if version != SHARD_VERSION:
        raise UserError(f"{path}: token shard of version {version}, expected {SHARD_VERSION}: tokenize the text anew")
    if count < 1:
        raise UserError(f"{path}: its header promises {count} tokens, expected at least 1: tokenize the text anew")
    check_size(path, size, HEADER_BYTES + 2 * count, f"{count} tokens")
    with file_errors(path, "cannot map it; with very many shards raise the limit of open files (ulimit -n)"):
        return np.memmap(path, "<u2", mode="r", offset=HEADER_BYTES, shape=(count,))


def open_shards(pattern: str) -> list[np.memmap]:
    """The shards that a path or a glob pattern matches, sorted by path: see open_shard. UserError if there is none."""
    pattern = os.path.expanduser(pattern)  # a quoted pattern reaches us with its ~
    # A path that exists is taken as it stands: its brackets are no pattern.
    paths = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
    if not paths:
        raise UserError(
            f"no file matches {pattern}, expected llm.c token shards (.bin): check --train-data and --val-data"
        )
    return [open_shard(Path(path)) for path in paths]
