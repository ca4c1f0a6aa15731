"""manifest.json of a folder of shards: their inputs and options, which shards are complete, and where to resume.

    tokenizer, vocabulary      name; number of tokens
    separator                  the tokens placed between two documents
    options                    field, split_documents, shard_tokens, val_percent, name, batch_characters
    format                     FORMAT
    reading                    the value of READING when the folder was begun
    inputs                     in order: path, bytes, sha256, documents, empty_documents (skipped), characters,
                               end_of_text (whether a literal <|endoftext|> was read as ordinary text)
    shards                     file, split ("train" or "val"), tokens, bytes, sha256, end: [batches, tokens]
    complete                   true when nothing is missing
    crc32                      of all the above

`end` is the place in the input where a shard ends: after `batches` whole batches and `tokens` tokens of the next batch.
Nothing in the manifest depends on the number of processes, or on whether the work was interrupted.
"""

import fcntl
import hashlib
import json
import os
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gpt2.data.inputs import Input, check_unchanged
from gpt2.data.tokenizers import END_OF_TEXT
from gpt2.errors import UserError, file_errors
from gpt2.files import read_bytes, write_json
from scripts.preparation.batches import read_pieces

READING = 2  # increase READING when the same input may be read or cut differently than before
FORMAT = "gpt2-mpi shards 1"
FILE = "manifest.json"
CHECKSUM = "crc32"


def survey(field: str, splits: bool, source: Input) -> dict:
    """Read an input twice and return its entry in the manifest. Raise UserError or InputChanged like read_pieces."""
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


def total(surveyed: Iterable[dict], what: str) -> int:
    return sum(facts[what] for facts in surveyed)


@contextmanager
def owned_folder(folder: Path) -> Iterator[None]:
    """Make the folder if it is missing, and keep other prepare.py processes out of it while the block runs."""
    with file_errors(folder, "cannot write there: give --out a folder that is writable and has room"):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(f"{folder}: another prepare.py is writing there: wait for it, or give another --out") from error
    except OSError:
        pass  # a file system without locks
    try:
        yield
    finally:
        os.close(handle)


def read_manifest(folder: Path) -> dict | None:
    """Return the manifest; None in a folder without manifest and shards. Raise UserError if there are only shards."""
    path = folder / FILE
    if not path.exists():
        for other in sorted(folder.glob("*.bin")):
            raise UserError(f"{folder}: holds {other.name} but no {FILE}: give --out a folder of its own")
        return None
    with file_errors(path, "check its permissions"):
        content = read_bytes(path)
    with suppress(ValueError, RecursionError):
        found = json.loads(content)
        if type(found) is dict and found.get("format", FORMAT) != FORMAT:
            raise UserError(
                f"{path}: its format is {found['format']!r}, expected {FORMAT!r}: give --out a folder of its own"
            )
        if type(found) is dict and found.pop(CHECKSUM, None) == manifest_checksum(found):
            return found
    raise UserError(f"{path}: not a manifest of prepare.py, or damaged: give --out a folder of its own")


def write_manifest(folder: Path, manifest: dict) -> None:
    write_json(folder / FILE, manifest | {CHECKSUM: manifest_checksum(manifest)})


def take_back(folder: Path, manifest: dict, kept: int) -> None:
    """Remove all but the first `kept` shards from manifest and folder. Remove the manifest if no shard is left."""
    for shard in manifest["shards"][kept:]:
        (folder / shard["file"]).unlink(missing_ok=True)
    del manifest["shards"][kept:]
    if kept:
        write_manifest(folder, manifest)
    else:
        (folder / FILE).unlink(missing_ok=True)


def manifest_checksum(manifest: dict) -> int:
    """Return the checksum of a manifest that does not contain its checksum."""
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def check_made_alike(folder: Path, found: dict, expected: dict) -> None:
    """Raise UserError unless the shards were made with the same tokenizer and options."""
    if found["tokenizer"] != expected["tokenizer"]:
        refuse(folder, f"made with --tokenizer {found['tokenizer']}, this is {expected['tokenizer']}")
    for name, value in expected["options"].items():
        if (other := found["options"].get(name)) != value:
            refuse(folder, f"made with --{name.replace('_', '-')} {other}, this is {value}")


def check_same_inputs(folder: Path, found: dict, surveyed: list[dict]) -> None:
    """Raise UserError unless the shards were made from files with the same contents; paths may differ."""
    if len(found["inputs"]) != len(surveyed):
        refuse(folder, f"made of {len(found['inputs'])} files, these are {len(surveyed)}")
    for before, now in zip(found["inputs"], surveyed, strict=True):
        if (before["bytes"], before["sha256"]) != (now["bytes"], now["sha256"]):
            refuse(folder, f"made of {before['path']} with other contents than {now['path']} has now")


def check_read_alike(folder: Path, found: dict) -> None:
    """Raise UserError if the folder is incomplete and was begun by a version that reads texts differently."""
    if found["shards"] and found["reading"] != READING:
        refuse(folder, "begun by another version, which reads text in another way, and are not complete")


def refuse(folder: Path, reason: str) -> None:
    raise UserError(f"{folder}: its shards were {reason}: give another --out, or remove the folder")


def whole_shards(folder: Path, shards: list[dict]) -> list[dict]:
    """Return the shards before the first one that is missing or does not match the manifest."""
    whole = []
    for shard in shards:
        path = folder / shard["file"]
        if not path.is_file() or any(shard[what] != found for what, found in checksum(path).items()):
            break
        whole.append(shard)
    return whole
