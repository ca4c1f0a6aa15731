"""Tokenize a text into token shards, only once: file names contain a hash of the content.

The first 90 % of the characters are for training, the rest for validation, each tokenized separately (as in nanoGPT).

The default text is shakespeare.txt: six plays by William Shakespeare (Coriolanus, Richard III, Richard II, Romeo and
Juliet, Henry VI part 3, The Winter's Tale), in the public domain. It is the beginning of tinyshakespeare (Andrej
Karpathy's char-rnn, data/tinyshakespeare/input.txt), the same bytes on every machine, so that losses can be compared.
"""

import hashlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import tiktoken

from gpt2.data.cuts import pieces_of
from gpt2.data.documents import OF_THE_FILES, READ_AS_TEXT, read_chunks
from gpt2.data.inputs import EMPTY, Input, Remarks, bare_name, find_inputs
from gpt2.data.shards import open_shard, write_shard
from gpt2.data.tokenizers import END_OF_TEXT, load_tokenizer
from gpt2.errors import UserError, file_errors
from gpt2.files import read_bytes

TRAIN_PERCENT = 90
SHAKESPEARE = Path(__file__).with_name("shakespeare.txt")
SHAKESPEARE_SHA256 = "f560ada7082e71cda0fed573d553d16700e05646ee52a9f45131570f8481844c"
OR_ANOTHER = "or give a text of your own to --text"


def prepare(
    text: str | Path | None, tokenizer_name: str, folder: Path, splits: bool = False, remark: Callable | None = None
) -> tuple[Path, Path]:
    """Return the paths of a text's training and validation shards. Only one rank may call this.

    text: a file or a folder, as prepare.py reads it, or None for the default text. Documents are separated
    by the tokenizer's end-of-text token, or a newline if it has none. The text is held in memory. The shards
    <folder>/<name>-<tokenizer>-<hash>-{train,val}.bin are written unless valid ones exist. splits: as in read_chunks.
    remark: called with Remarks' line, if any. UserError: unreadable, not UTF-8, empty or too short text; unwritable
    folder.
    """
    encoding = load_tokenizer(tokenizer_name)
    if text is None:
        name = "shakespeare"
        documents = [shakespeare()]
    else:
        name = bare_name(Path(text))
        documents, _, remarks = read_documents(Path(text), splits)
        if remark and str(remarks):
            remark(str(remarks))
    stem = f"{name}-{tokenizer_name}-{content_hash(documents, tokenizer_name)[:12]}"
    paths = tuple(Path(folder) / f"{stem}-{part}.bin" for part in ("train", "val"))
    with suppress(UserError):  # if one is missing or damaged, write both below
        for path in paths:
            open_shard(path)
        return paths
    with file_errors(folder, "expected a writable folder for token shards; choose another"):
        Path(folder).mkdir(parents=True, exist_ok=True)
    # Tokenize both parts before writing: a text that is too short must leave no shard behind.
    parts = [join_tokens(part, encoding) for part in split(documents)]
    for kind, tokens in zip(("training", "validation"), parts, strict=True):
        if len(tokens) < 2:
            raise UserError(
                f"{text or name}: {sum(map(len, documents))} characters leave {len(tokens)} tokens for {kind}, "
                "expected at least 2: give more text"
            )
    for path, tokens in zip(paths, parts, strict=True):
        write_shard(path, tokens)
    return paths


def shakespeare(path: Path = SHAKESPEARE) -> str:
    """Return the text, 846,170 ASCII characters. UserError: the file is missing, unreadable or not this text."""
    with file_errors(path, f"it comes with this project: install it again, {OR_ANOTHER}"):
        content = read_bytes(path)
    found = hashlib.sha256(content).hexdigest()
    if found != SHAKESPEARE_SHA256:
        raise UserError(
            f"{path}: its SHA-256 begins {found[:12]}, expected {SHAKESPEARE_SHA256[:12]}, that of the text which this "
            f"version comes with: install the project again, {OR_ANOTHER}"
        )
    return content.decode("ascii")


def tokens_of(text: str, encoding: tiktoken.Encoding) -> np.ndarray:
    """Return the token ids (n,) uint16 of a text. Special tokens in it count as ordinary text."""
    if encoding.name == "bytes":
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.uint16)
    # In pieces, because tiktoken fails on a million white-space characters before a word. encode_to_numpy does what
    # encode_ordinary does, but without a Python integer for each token.
    pieces = (encoding.encode_to_numpy(piece, disallowed_special=()) for piece in pieces_of(text))
    return np.concatenate([tokens.astype(np.uint16) for tokens in pieces])


def document_start(encoding: tiktoken.Encoding) -> np.ndarray:
    """Return the token (1,) uint16 that separates documents: end-of-text, or a newline if there is none."""
    end_of_text = encoding.special_tokens_set and [encoding.eot_token]
    return np.array(end_of_text or tokens_of("\n", encoding), np.uint16)


def join_tokens(documents: list[str], encoding: tiktoken.Encoding) -> np.ndarray:
    """Return the token ids (n,) uint16 of the documents, with document_start between them."""
    separator = document_start(encoding)
    pieces = []
    for document in documents:
        pieces += [separator, tokens_of(document, encoding)]
    return np.concatenate(pieces[1:]) if pieces else separator[:0]


def split(documents: list[str]) -> tuple[list[str], list[str]]:
    """Split documents after 90 % of the characters. The document at the border is cut in two."""
    left = sum(map(len, documents)) * TRAIN_PERCENT // 100
    train = []
    validation = []
    for document in documents:
        train.append(document[:left])
        validation.append(document[left:])
        left = max(0, left - len(document))
    return [part for part in train if part], [part for part in validation if part]


def read_documents(text: Path, splits: bool = False) -> tuple[list[str], list[Path], Remarks]:
    """Return the documents of a file or a folder, without empty ones; their files; and remarks about them.

    Reads the field or column "text" of .jsonl and .parquet files. splits: as in read_chunks. UserError: as in
    find_inputs and read_chunks, or there is no text.
    """
    inputs, remarks = find_inputs([text])
    documents = []
    for source in inputs:
        found = documents_of(source, splits)
        if any(END_OF_TEXT in document for document in found):
            remarks.add(OF_THE_FILES, source.path, READ_AS_TEXT)
        if not found:
            remarks.add(EMPTY, source.path)
        documents += found
    if not documents:
        raise UserError(f"{text}: no text in it, expected one document or more: give another")
    return documents, [source.path for source in inputs], remarks


def documents_of(source: Input, splits: bool) -> list[str]:
    """Return the documents of one file, without empty ones."""
    documents = []
    for begins, chunk in read_chunks(source, "text", splits):
        if begins:
            documents.append([])
        documents[-1].append(chunk)
    return list(filter(None, map("".join, documents)))


def content_hash(documents: list[str], tokenizer_name: str) -> str:
    """Return the SHA-256 (hex) of the documents, the tokenizer's name and the split."""
    digest = hashlib.sha256(f"{tokenizer_name} {TRAIN_PERCENT}".encode())
    for document in documents:
        content = document.encode("utf-8")
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.hexdigest()
