"""Documents cut into batches for the tokenizer. Each is small, and they are the same whoever tokenizes them.

A long document is cut where no token can cross: between a character that is no white space and the space or line break
after it. There every match of GPT-2's pattern ends (the openai/gpt-2 repository, encoder.py), and none looks beyond it.
So the tokens of the pieces, one after another, are the tokens of the document.
"""

import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import NamedTuple

import numpy as np

from gpt2.data.texts import join_tokens, tokens_of
from gpt2.data.tokenizers import load_tokenizer
from gpt2.errors import UserError
from scripts.preparation.documents import Chunk, read_chunks
from scripts.preparation.files import Input, check_unchanged

END_OF_TEXT = "<|endoftext|>"
BATCH_CHARACTERS = 1 << 18  # some 25 ms of tokenizing
LONGEST_RUN = 1 << 24  # characters in which there must be one place to cut
LAST_CUT = re.compile(r"(?s:.*\S)(?=[ \n])")
NEXT_CUT = re.compile(r"\S(?=[ \n])")


class Batch(NamedTuple):
    """Texts to tokenize as (whether a separator goes before it, text), all for one split, "train" or "val"."""

    split: str
    texts: list[tuple[bool, str]]
    characters: int


def batches(pieces: Iterable[Chunk], border: int) -> Iterator[Batch]:
    """The first `border` characters of the documents are for training, the rest for validation."""
    held, size, current = [], 0, "train"
    for split, separated, text in split_at(border, pieces):
        if held and (split != current or size + len(text) > BATCH_CHARACTERS):
            yield Batch(current, held, size)
            held, size = [], 0
        held.append((separated, text))
        size += len(text)
        current = split
    if held:
        yield Batch(current, held, size)


def read_pieces(source: Input, field: str) -> Iterator[Chunk]:
    """The file's documents in chunks of about BATCH_CHARACTERS at most, cut where it changes no token.

    The document alone decides where, not how it was read. UserError: as read_chunks, or nowhere to cut. InputChanged:
    the file was changed since it was found.
    """
    try:
        yield from cut_pieces(source, field)
    except UserError:
        check_unchanged(source)  # which is why it seems to be damaged
        raise
    check_unchanged(source)


def cut_pieces(source: Input, field: str) -> Iterator[Chunk]:
    """The same, of a file that nobody changes."""
    begins, held = True, None
    for begins_document, text in read_chunks(source, field):
        if begins_document:
            if held is not None:
                yield begins, held
            begins, held = True, ""
        held, start = held + text, 0
        while cut := find_cut(held, start, source.path):
            yield begins, held[start:cut]
            begins, start = False, cut
        held = held[start:]
    if held is not None:
        yield begins, held


def find_cut(text: str, start: int, path) -> int:
    """Where a piece that begins at `start` ends; 0 if it needs no cut, or more text to find one."""
    stop = start + BATCH_CHARACTERS
    if len(text) <= stop:
        return 0
    found = LAST_CUT.match(text, start, stop + 1) or NEXT_CUT.search(text, stop)
    if not found and len(text) - start > LONGEST_RUN:
        raise UserError(
            f"{path}: {LONGEST_RUN} characters from {text[start : start + 30]!r} on hold neither a space nor a line "
            "break between them, expected text: leave this document out"
        )
    return found.end() if found else 0


def split_at(border: int, documents: Iterable[Chunk]) -> Iterator[tuple[str, bool, str]]:
    """(split, whether a separator goes before it, text): a separator between any two documents of a split.

    A document across the border is cut in two there, as gpt2.data.texts does.
    """
    seen, begun = 0, {"train": False, "val": False}
    for begins, text in documents:
        cut = min(len(text), max(0, border - seen))
        seen += len(text)
        for split, part in (("train", text[:cut]), ("val", text[cut:])):
            if part:
                yield split, begins and begun[split], part
                begun[split] = True


def tokenize(tokenizer: str, batch: Batch) -> tuple[str, int, np.ndarray]:
    """The batch's split, its characters, and its token ids (n,) uint16."""
    encoding = encoding_of(tokenizer)
    if encoding.special_tokens_set and not any(END_OF_TEXT in text for _, text in batch.texts):
        # One call for all of them, which is some 5 % quicker for documents of a few kB than one for each.
        joined = "".join(END_OF_TEXT + text if separated else text for separated, text in batch.texts)
        tokens = encoding.encode_to_numpy(joined, allowed_special={END_OF_TEXT}, disallowed_special=())
        return batch.split, batch.characters, tokens.astype(np.uint16)
    separator, tokens = separator_of(encoding), []
    for separated, text in batch.texts:
        tokens += [separator, tokens_of(text, encoding)] if separated else [tokens_of(text, encoding)]
    return batch.split, batch.characters, np.concatenate(tokens)


def separator_of(encoding) -> np.ndarray:
    """The token ids (n,) uint16 that go between two documents."""
    return join_tokens(["", ""], encoding)


@cache
def encoding_of(tokenizer: str):
    """Loaded once in each process."""
    return load_tokenizer(tokenizer)
