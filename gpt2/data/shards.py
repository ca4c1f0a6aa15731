"""Token shards: files of token ids in llm.c's format, read through the page cache and never loaded whole.

The format (llm.c, dev/data/data_common.py), little-endian throughout:

    256 int32   header: [0] = 20240520, [1] = 1, [2] = number of tokens, the rest 0
    uint16      the tokens, to the end of the file
"""

import glob
import os
from pathlib import Path

import numpy as np

from gpt2.errors import UserError, file_errors
from gpt2.files import replacing
from gpt2.formats.llmc_header import HEADER_BYTES, SHARD_MAGIC, check_size, make_header, read_header

SHARD_VERSION = 1
MAX_TOKEN = np.iinfo(np.uint16).max
MAX_COUNT = np.iinfo(np.int32).max  # the header counts tokens in an int32


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
