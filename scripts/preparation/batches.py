"""Documents cut into batches for the tokenizer. Each is small, and they are the same whoever tokenizes them.

A long document is cut where no token can cross (gpt2/data/cuts.py). So the tokens of the pieces, one after another, are
the tokens of the document.
"""

from collections.abc import Iterable, Iterator
from functools import cache
from typing import NamedTuple

import numpy as np

from gpt2.data.cuts import ANYWHERE, PIECE_CHARACTERS, Cutter
from gpt2.data.documents import Chunk, read_chunks
from gpt2.data.inputs import Input, check_unchanged
from gpt2.data.texts import join_tokens, tokens_of
from gpt2.data.tokenizers import END_OF_TEXT, load_tokenizer
from gpt2.errors import UserError

BATCH_CHARACTERS = PIECE_CHARACTERS
LONGEST_RUN = 1 << 24  # characters in which there must be one place to cut: a match of them takes some 0.8 GB
CUTTER = Cutter(ANYWHERE)  # not the one for complete texts: split_at may end a text soon after a cut


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


def read_pieces(source: Input, field: str, splits: bool = False) -> Iterator[Chunk]:
    """The file's documents in chunks of about BATCH_CHARACTERS at most, cut where it changes no token.

    The document alone decides where, not how it was read. splits: as read_chunks takes it. UserError: as read_chunks,
    or nowhere to cut. InputChanged: the file was changed since it was found.
    """
    try:
        yield from cut_pieces(source, field, splits)
    except UserError:
        check_unchanged(source)  # which is why it seems to be damaged
        raise
    check_unchanged(source)


def cut_pieces(source: Input, field: str, splits: bool) -> Iterator[Chunk]:
    """The same, of a file that nobody changes."""
    begins, held = True, None
    for begins_document, text in read_chunks(source, field, splits):
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
    cut = CUTTER.end_of_piece(text, start, BATCH_CHARACTERS)
    if not cut and len(text) - start > LONGEST_RUN:
        raise UserError(
            f"{path}: {LONGEST_RUN} characters from {text[start : start + 30]!r} on have no place to cut them without "
            "changing a token, such as a space, a line break or a full stop: break them into lines, or leave them out"
        )
    return cut


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
    # A piece that is longer may hold more white space than tiktoken takes at once: tokens_of sees to it.
    short = batch.characters <= BATCH_CHARACTERS
    if short and encoding.special_tokens_set and not any(END_OF_TEXT in text for _, text in batch.texts):
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
