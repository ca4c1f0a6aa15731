"""Text to token shards: tokenized once, kept in a folder under a name that carries the content's hash.

The first 90 % of the characters are for training, the rest for validation, each tokenized on its own (as in nanoGPT).
"""

import hashlib
import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import tiktoken

from gpt2.data.corpora import CORPORA, DEFAULT_CORPUS
from gpt2.data.shards import open_shard, write_shard
from gpt2.data.tokenizers import load_tokenizer
from gpt2.errors import UserError, file_errors
from gpt2.files import read_bytes

TRAIN_PERCENT = 90


def prepare(text: Path | None, tokenizer_name: str, folder: Path, corpus: str = DEFAULT_CORPUS) -> tuple[Path, Path]:
    """Paths of the training and the validation shard of a text; to be called by one rank.

    `text`: a UTF-8 file; a folder, whose *.txt at any depth are joined, in sorted order, by the tokenizer's end-of-text
    token, or a newline where it has none; or None for the embedded corpus of that name (corpora.py). Everything is held
    in memory once. The shards <folder>/<stem>-<tokenizer>-<hash>-{train,val}.bin are written unless valid ones
    are there. UserError: unreadable, not UTF-8, empty or too short text; unwritable folder.
    """
    encoding = load_tokenizer(tokenizer_name)
    name, documents = read_documents(text, corpus)
    stem = f"{name}-{tokenizer_name}-{content_hash(documents, tokenizer_name)[:12]}"
    paths = tuple(Path(folder) / f"{stem}-{part}.bin" for part in ("train", "val"))
    with suppress(UserError):  # one is missing or damaged: both are written below
        for path in paths:
            open_shard(path)
        return paths
    with file_errors(folder, "expected a writable folder for token shards; choose another"):
        Path(folder).mkdir(parents=True, exist_ok=True)
    # Both are made before either is written: a text that is too short leaves no shard behind.
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


def tokens_of(text: str, encoding: tiktoken.Encoding) -> np.ndarray:
    """Token ids (n,) uint16 of a text; what looks like a special token in it is ordinary text."""
    if encoding.name == "bytes":
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.uint16)
    # encode_ordinary's result without a Python integer for each token.
    return encoding.encode_to_numpy(text, disallowed_special=()).astype(np.uint16)


def join_tokens(documents: list[str], encoding: tiktoken.Encoding) -> np.ndarray:
    """Token ids (n,) uint16 of the documents, end-of-text or newline between them."""
    end_of_text = encoding.special_tokens_set and [encoding.eot_token]
    separator = np.array(end_of_text or tokens_of("\n", encoding), np.uint16)
    pieces = []
    for document in documents:
        pieces += [separator, tokens_of(document, encoding)]
    return np.concatenate(pieces[1:]) if pieces else separator[:0]


def split(documents: list[str]) -> tuple[list[str], list[str]]:
    """The first 90 % of the characters and the rest, both as documents; the one at the border is cut in two."""
    left = sum(map(len, documents)) * TRAIN_PERCENT // 100
    train, validation = [], []
    for document in documents:
        train.append(document[:left])
        validation.append(document[left:])
        left = max(0, left - len(document))
    return [part for part in train if part], [part for part in validation if part]


def read_documents(text: Path | None, corpus: str) -> tuple[str, list[str]]:
    """A name for the text, and its documents in order."""
    if text is None:
        return corpus, [CORPORA[corpus]()]
    text = Path(text)
    if not os.path.isdir(text):  # unlike Path.is_dir, no error where permission is missing: read_text reports it
        return text.stem, [read_text(text)]
    with file_errors(text, "check the folder's permissions"):
        paths = sorted(path for path in text.rglob("*.txt") if path.is_file())
    if not paths:
        raise UserError(f"{text}: no *.txt in this folder, expected one or more: give --text a file or another folder")
    return text.resolve().name, [read_text(path) for path in paths]


def read_text(path: Path) -> str:
    with file_errors(path, "expected a text file; check --text"):
        content = read_bytes(path)
    if not content:
        raise UserError(f"{path}: the file is empty, expected text: remove it, or give another to --text")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: byte {error.start} (0x{content[error.start]:02x}) is not UTF-8, expected UTF-8 text: "
            "convert the file with iconv, or give another to --text"
        ) from error


def content_hash(documents: list[str], tokenizer_name: str) -> str:
    """SHA-256 (hex) of all that decides the shards: the documents, where one ends, the tokenizer and the split."""
    digest = hashlib.sha256(f"{tokenizer_name} {TRAIN_PERCENT}".encode())
    for document in documents:
        content = document.encode("utf-8")
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.hexdigest()
