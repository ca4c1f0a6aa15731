"""manifest.json of a folder of shards: their inputs, options and checksums.

    format                     FORMAT
    tokenizer, vocabulary      name; number of tokens
    separator                  the tokens placed between two documents
    options                    field, split_documents, shard_tokens, val_percent, name
    inputs                     in order: path, bytes, sha256, documents, empty_documents (skipped), characters,
                               end_of_text (whether a literal <|endoftext|> was read as ordinary text)
    shards                     file, split ("train" or "val"), tokens, bytes, sha256

Nothing in the manifest depends on the number of threads.
"""

import hashlib
from collections.abc import Iterable

from gpt2.data.inputs import Input, check_unchanged
from gpt2.data.tokenizers import END_OF_TEXT
from gpt2.errors import file_errors
from scripts.preparation.batches import read_pieces

FORMAT = "gpt2-mpi shards 2"
FILE = "manifest.json"


def survey(source: Input, field: str, splits: bool) -> dict:
    """Read an input twice and return its entry in the manifest. Raise UserError like read_pieces."""
    documents = 0
    empty = 0
    characters = 0
    end_of_text = False
    for begins, text in read_pieces(source, field, splits):
        end_of_text = end_of_text or END_OF_TEXT in text  # no piece ends inside it
        documents += begins and bool(text)
        empty += not text
        characters += len(text)
    content = checksum(source.path)
    check_unchanged(source)
    return {
        "path": str(source.path),
        **content,
        "documents": documents,
        "empty_documents": empty,
        "characters": characters,
        "end_of_text": end_of_text,
    }


def checksum(path) -> dict:
    """Return the file's size and SHA-256 (hex)."""
    with file_errors(path, "expected a file that can be read; check its permissions"), open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


def total(entries: Iterable[dict], what: str) -> int:
    """Return the sum of a number over entries of the manifest."""
    return sum(facts[what] for facts in entries)
