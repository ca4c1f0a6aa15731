"""Cut documents into small batches for the tokenizer. The cuts do not depend on the number of threads.

A long document is cut where no token can cross (gpt2/data/cuts.py), so its pieces give the whole document's tokens.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from tiktoken import Encoding

from gpt2.data.cuts import ANYWHERE, PIECE_CHARACTERS, end_of_piece
from gpt2.data.documents import Chunk, read_chunks
from gpt2.data.inputs import Input, check_unchanged
from gpt2.data.texts import document_start, tokens_of
from gpt2.data.tokenizers import END_OF_TEXT
from gpt2.errors import UserError

BATCH_CHARACTERS = PIECE_CHARACTERS
LONGEST_RUN = 1 << 24  # characters without a place to cut; matching a longer run would take more than 0.8 GB


class Batch(NamedTuple):
    """Texts for one split, "train" or "val". texts: pairs (whether a separator precedes the text, text)."""

    split: str
    texts: list[tuple[bool, str]]
    characters: int


def batches(pieces: Iterable[Chunk], border: int) -> Iterator[Batch]:
    """Group the pieces into batches; the first `border` characters are for training, the rest for validation."""
    held = []
    size = 0
    current = "train"
    for split, separated, text in split_at(border, pieces):
        if held and (split != current or size + len(text) > BATCH_CHARACTERS):
            yield Batch(current, held, size)
            held = []
            size = 0
        held.append((separated, text))
        size += len(text)
        current = split
    if held:
        yield Batch(current, held, size)


def read_pieces(source: Input, field: str, splits: bool = False) -> Iterator[Chunk]:
    """Read a file's documents in pieces of about BATCH_CHARACTERS at most, cut where no token changes.

    The cuts depend on the document alone. splits: as for read_chunks. Raise UserError like read_chunks, if there is no
    place to cut, or if the file has changed since it was found.
    """
    try:
        yield from cut_pieces(source, field, splits)
    except UserError:
        check_unchanged(source)  # the file may seem damaged only because it has changed
        raise
    check_unchanged(source)


def cut_pieces(source: Input, field: str, splits: bool) -> Iterator[Chunk]:
    """Read pieces like read_pieces, without noticing changes of the file."""
    begins = True
    held = None
    for begins_document, text in read_chunks(source, field, splits):
        if begins_document:
            if held is not None:
                yield begins, held
            begins = True
            held = ""
        held = held + text
        start = 0
        while cut := find_cut(held, start, source.path):
            yield begins, held[start:cut]
            begins = False
            start = cut
        held = held[start:]
    if held is not None:
        yield begins, held


def find_cut(text: str, start: int, path) -> int:
    """Return the end of the piece that begins at `start`; 0 if it needs no cut, or if finding one needs more text."""
    # Not IN_COMPLETE_TEXT: split_at may end a text soon after a cut.
    cut = end_of_piece(text, start, BATCH_CHARACTERS, ANYWHERE)
    if not cut and len(text) - start > LONGEST_RUN:
        raise UserError(
            f"{path}: {LONGEST_RUN} characters from {text[start : start + 30]!r} on have no place to cut them without "
            "changing a token, such as a space, a line break or a full stop: break them into lines, or leave them out"
        )
    return cut


def split_at(border: int, documents: Iterable[Chunk]) -> Iterator[tuple[str, bool, str]]:
    """Yield (split, whether a separator precedes the text, text). Separators stand between the documents of a split.

    A document that crosses the border is cut there, as in gpt2.data.texts.
    """
    seen = 0
    begun = {"train": False, "val": False}
    for begins, text in documents:
        cut = min(len(text), max(0, border - seen))
        seen += len(text)
        for split, part in (("train", text[:cut]), ("val", text[cut:])):
            if part:
                yield split, begins and begun[split], part
                begun[split] = True


def tokenize(batch: Batch, encoding: Encoding) -> np.ndarray:
    """Return the batch's token ids (n,) uint16."""
    # A longer piece may hold more white space than tiktoken can take at once; tokens_of handles that.
    short = batch.characters <= BATCH_CHARACTERS
    if short and encoding.special_tokens_set and not any(END_OF_TEXT in text for _, text in batch.texts):
        # For documents of a few kB, one call for the batch is about 5% faster than a call for each document.
        joined = "".join(END_OF_TEXT + text if separated else text for separated, text in batch.texts)
        tokens = encoding.encode_to_numpy(joined, allowed_special={END_OF_TEXT}, disallowed_special=())
        return tokens.astype(np.uint16)
    separator = document_start(encoding)
    tokens = []
    for separated, text in batch.texts:
        tokens += [separator, tokens_of(text, encoding)] if separated else [tokens_of(text, encoding)]
    return np.concatenate(tokens)
