"""Write tokens into shard files of a given size."""

from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np

from gpt2.data.shards import SHARD_VERSION
from gpt2.files import new_file
from gpt2.formats.llmc_header import HEADER_BYTES, SHARD_MAGIC, make_header
from scripts.preparation.manifest import checksum


def write_shards(folder: Path, name: str, shard_tokens: int, parts: Iterable[tuple[str, np.ndarray]]) -> list[dict]:
    """Write the tokens of each split to <name>_<split>_000000.bin etc., `shard_tokens` tokens to each but the last.

    parts: pairs (split, tokens), all of one split before those of the next. Return the manifest's entries of the
    shards. OSError: writing failed.
    """
    shards = []
    for split, parts_of_split in groupby(parts, itemgetter(0)):
        tokens = (tokens for _, tokens in parts_of_split)
        for number, parts_of_shard in groupby(cut(tokens, shard_tokens), itemgetter(0)):
            path = folder / f"{name}_{split}_{number:06}.bin"
            count = write_shard(path, (tokens for _, tokens in parts_of_shard))
            shards.append({"file": path.name, "split": split, "tokens": count, **checksum(path)})
    return shards


def cut(arrays: Iterable[np.ndarray], size: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (shard number, tokens) for shards of `size` tokens."""
    position = 0
    for tokens in arrays:
        while len(tokens):
            part = tokens[: size - position % size]
            yield position // size, part
            position += len(part)
            tokens = tokens[len(part) :]


def write_shard(path: Path, parts: Iterable[np.ndarray]) -> int:
    """Write a shard part by part and return its number of tokens."""
    count = 0
    with new_file(path) as file:
        file.write(bytes(HEADER_BYTES))
        for tokens in parts:
            file.write(np.ascontiguousarray(tokens, "<u2"))
            count += len(tokens)
        file.seek(0)
        file.write(make_header(SHARD_MAGIC, SHARD_VERSION, count))
    return count
