"""The header of llm.c's files: 256 little-endian int32. The first one, the magic number, identifies the kind of file.

Token shards (gpt2/data/shards.py), model checkpoints (llmc.py) and evaluations (evaluation_choices.py) share it.
"""

import os
from pathlib import Path

import numpy as np

from gpt2.errors import UserError, file_errors
from gpt2.files import regular

HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS
SHARD_MAGIC = 20240520
MODEL_MAGIC = 20240326
CHOICES_MAGIC = 20240522

# A wrong file is usually another kind of llm.c file.
KNOWN_FILES = {
    SHARD_MAGIC: "an llm.c token shard: give it to --train-data or --val-data",
    MODEL_MAGIC: "an llm.c model checkpoint: give it to --init",
    20240327: "llm.c's debug state: give a token shard or a model checkpoint instead",
    20240328: "llm.c's tokenizer: it is not needed here, choose one with --tokenizer",
    CHOICES_MAGIC: "an llm.c multiple-choice evaluation: give it to evaluate.py --hellaswag",
    20240801: "a Llama 3 token shard (uint32): tokenize the text anew with --tokenizer gpt2 or bytes",
}


def make_header(*numbers: int) -> np.ndarray:
    """Return a header (256,) int32 that begins with `numbers`, the rest 0."""
    header = np.zeros(HEADER_INTS, "<i4")
    header[: len(numbers)] = numbers
    return header


def read_header(path: Path, magic: int) -> tuple[list[int], int]:
    """Return the 256 numbers of a file's header, and its size in bytes. UserError: unreadable, another `magic`."""
    expected = KNOWN_FILES[magic].split(":")[0]
    advice = f"expected {expected}; check the path and its permissions"
    with file_errors(path, advice), open(path, "rb", opener=regular) as file:
        size = os.fstat(file.fileno()).st_size
        header = np.fromfile(file, "<i4", count=HEADER_INTS)
    if size < HEADER_BYTES or header.size < HEADER_INTS:
        found = f"ends after {size} bytes" if size else "is empty"
        raise UserError(
            f"{path}: {found}, expected {expected}, with a header of {HEADER_BYTES} bytes: write or copy it again"
        )
    if header[0] != magic:
        hint = KNOWN_FILES.get(int(header[0]), "unknown: check the path, or write the file again")
        raise UserError(f"{path}: begins with {header[0]}, expected {magic} of {expected}; this is {hint}")
    return header.tolist(), size


def check_size(path: Path, size: int, expected: int, contents: str) -> None:
    """Raise a UserError unless the file has the size in bytes that its header promises."""
    if size != expected:
        difference = f"{abs(expected - size)} too {'few' if size < expected else 'many'}"
        raise UserError(
            f"{path}: {size} bytes, {difference}: its header promises {contents}, {expected} bytes: "
            "the file is damaged or still being written, write or copy it again"
        )
