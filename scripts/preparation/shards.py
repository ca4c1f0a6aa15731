"""Write tokens into shard files of a given size."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from gpt2.data.shards import SHARD_VERSION
from gpt2.errors import file_errors
from gpt2.files import place_of_file
from gpt2.formats.llmc_header import HEADER_BYTES, SHARD_MAGIC, make_header
from scripts.preparation.manifest import checksum

ADVICE = "cannot write it: make room or check the folder, then run the same command again, which goes on from here"
PART = ".part"  # appended to the name of an incomplete shard


class ShardWriter:
    """Writes the tokens of each split to <name>_<split>_000000.bin etc., `shard_tokens` tokens to each but the last.

    A shard is written as <its name>.part and renamed when it is complete and on disk. Then `completed` is called with
    the shard's entry for the manifest. A .part file of an interrupted writer is overwritten. shards: the manifest's
    entries of existing shards. Raise UserError if writing fails.
    """

    def __init__(self, folder: Path, name: str, shard_tokens: int, shards: list[dict], completed: Callable):
        self._folder = folder
        self._name = name
        self._shard_tokens = shard_tokens
        self._completed = completed
        self._numbers = {split: sum(s["split"] == split for s in shards) for split in ("train", "val")}
        self._split = None
        self._file = None
        self._path = None
        self._count = 0

    def add(self, split: str, tokens: np.ndarray, batch: int, first: int) -> None:
        """Write tokens[first:], where `tokens` are all tokens of batch number `batch`."""
        if split != self._split:
            self.finish(batch)
        while first < len(tokens):
            if not self._file:
                self._open(split)
            part = tokens[first : first + self._shard_tokens - self._count]
            with file_errors(self._path, ADVICE):
                self._file.write(np.ascontiguousarray(part, "<u2"))
            self._count += len(part)
            first += len(part)
            if self._count == self._shard_tokens:
                self._close([batch, first])

    def finish(self, batch: int) -> None:
        """Complete the open shard, if any. batch: the number of the first batch after this shard."""
        if self._file:
            self._close([batch, 0])

    def __enter__(self):
        return self

    def __exit__(self, *unused) -> None:
        """Remove an incomplete shard."""
        if self._file:
            with suppress(OSError):  # on a full disk, the last buffered bytes cannot be written
                self._file.close()
            self._path.unlink(missing_ok=True)

    def _open(self, split: str) -> None:
        file = f"{self._name}_{split}_{self._numbers[split]:06}.bin"
        self._split = split
        self._path = self._folder / (file + PART)
        self._count = 0
        with file_errors(self._path, ADVICE):
            self._path.unlink(missing_ok=True)  # it may be a link or a pipe
            self._file = open(self._path, "xb")  # noqa: SIM115 (stays open between calls)
            self._file.write(bytes(HEADER_BYTES))

    def _close(self, end: list[int]) -> None:
        path = self._path.with_suffix("")  # without PART
        with file_errors(self._path, ADVICE):
            self._file.seek(0)
            self._file.write(make_header(SHARD_MAGIC, SHARD_VERSION, self._count))
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            facts = checksum(self._path)
            os.replace(self._path, place_of_file(path))
        self._file = None
        self._numbers[self._split] += 1
        self._completed({"file": path.name, "split": self._split, "tokens": self._count, **facts, "end": end})
