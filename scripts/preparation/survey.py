"""The first of the two times that prepare.py reads its input: what there is, and whether all of it can be used."""

import hashlib
from collections.abc import Iterable

from gpt2.errors import UserError, file_errors
from scripts.preparation.batches import read_pieces
from scripts.preparation.files import Input


def survey(field: str, source: Input) -> dict:
    """What the manifest says of a file. UserError as read_pieces."""
    documents = empty = characters = 0
    for begins, text in read_pieces(source, field):
        documents += begins and bool(text)
        empty += not text
        characters += len(text)
    return {
        "path": str(source.path),
        **checksum(source.path),
        "documents": documents,
        "empty_documents": empty,
        "characters": characters,
    }


def checksum(path) -> dict:
    """The file's size and SHA-256 (hex)."""
    with file_errors(path, "expected a file that can be read; check its permissions"), open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


def total(surveyed: Iterable[dict], what: str) -> int:
    return sum(facts[what] for facts in surveyed)


def check_text(surveyed: list[dict]) -> None:
    """UserError where there is no text at all."""
    if not total(surveyed, "characters"):
        others = f" and {len(surveyed) - 1} more" if len(surveyed) > 1 else ""
        raise UserError(f"{surveyed[0]['path']}{others}: no text in it, expected one document or more: give others")
