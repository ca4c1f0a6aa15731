"""The documents in a file that prepare.py reads, as chunks of text.

A chunk is (begins, text): `begins` is true for a document's first. A document of a .txt file, which is all of it, comes
in several, so that its size does not matter; one of a .jsonl or .parquet file in one. (True, "") is an empty document.
"""

import codecs
import json
from collections.abc import Iterator
from itertools import chain

from gpt2.errors import UserError
from scripts.preparation.files import BLOCK_BYTES, Input, blocks

Chunk = tuple[bool, str]

LONGEST_LINE = 1 << 28  # bytes: what a .jsonl without line ends may take of the memory before it is refused
PARQUET_ROWS = 64  # decoded together


def read_chunks(source: Input, field: str) -> Iterator[Chunk]:
    """The file's documents in order; `field` is the .jsonl's field, the .parquet's column.

    UserError: unreadable, damaged, not UTF-8 (which byte, line or row), a line that is no JSON or lacks the field.
    """
    if source.kind == ".txt":
        return read_text(source)
    texts = read_jsonl(source, field) if source.kind == ".jsonl" else read_parquet(source, field)
    return ((True, text) for text in texts)


def read_text(source: Input) -> Iterator[Chunk]:
    decoder, position, begins = codecs.getincrementaldecoder("utf-8")(), 0, True
    for block in chain(blocks(source), [b""]):
        held = decoder.getstate()[0]  # the first bytes of a character whose others are in this block
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise UserError(
                f"{source.path}: byte {position - len(held) + error.start} (0x{error.object[error.start]:02x}) is not "
                "UTF-8, expected UTF-8 text: convert the file with iconv"
            ) from error
        position += len(block)
        if text or (begins and not block):
            yield begins, text
            begins = False


def read_jsonl(source: Input, field: str) -> Iterator[str]:
    for number, line in enumerate(read_lines(source), 1):
        if line.strip():
            try:
                yield text_of_line(line, field)
            except UserError as error:
                raise UserError(f"{source.path}: line {number} {error}") from error


def read_lines(source: Input) -> Iterator[bytes]:
    """The lines without their ends; only what has no end yet is held."""
    begun, size = [], 0
    for block in blocks(source):
        *complete, rest = block.split(b"\n")
        if complete:
            yield b"".join([*begun, complete[0]])
            yield from complete[1:]
            begun, size = [], 0
        begun.append(rest)
        size += len(rest)
        if size > LONGEST_LINE:
            raise UserError(
                f"{source.path}: a line is longer than {LONGEST_LINE} bytes, expected one JSON object on each: "
                "write every document on a line of its own"
            )
    yield b"".join(begun)


def text_of_line(line: bytes, field: str) -> str:
    """The text in a line of JSON. UserErrors go on from "line 1 "."""
    try:
        found = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(
            f"is not UTF-8 at its byte {error.start} (0x{line[error.start]:02x}): convert the file with iconv"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"is not JSON ({error}), expected one object on each line: correct the line") from error
    if not isinstance(found, dict):
        raise UserError(f"holds {kind_of(found)}, expected an object with the field {field!r}")
    if field not in found:
        names = shortened(", ".join(map(repr, found)) or "no field")
        raise UserError(f"holds {names}, expected the field {field!r}: name the text's with --field")
    text = "" if found[field] is None else found[field]
    if not isinstance(text, str):
        raise UserError(f"has as {field!r} {kind_of(text)}, expected text: name the text's field with --field")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # an escape has put half a pair of surrogates there: UTF-8 has no place for it
        half = f"\\u{ord(text[error.start]):04x}"
        raise UserError(f"holds half a character ({half}), expected UTF-8 text: correct the line") from error
    return text


def kind_of(found) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(found), "a number")


def shortened(names: str) -> str:
    return names if len(names) <= 100 else f"{names[:100]}..."


def read_parquet(source: Input, field: str) -> Iterator[str]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UserError(f"{source.path}: reading Parquet needs the package pyarrow: pip install pyarrow") from error
    try:
        with parquet.ParquetFile(source.path, buffer_size=BLOCK_BYTES) as file:
            check_column(source, file.schema_arrow, field, pyarrow.types)
            row = 0
            for batch in file.iter_batches(PARQUET_ROWS, columns=[field], use_threads=False):
                for value in batch.column(0):
                    row += 1
                    yield value.as_py() or ""
    except UnicodeDecodeError as error:
        where = f"{source.path}: row {row} is not UTF-8 at its byte {error.start}"
        raise UserError(f"{where}: write it again with sound text") from error
    except (pyarrow.ArrowException, OSError) as error:
        reason = "".join(sign if sign.isprintable() else "?" for sign in " ".join(str(error).split()))
        raise UserError(
            f"{source.path}: cannot be read as Parquet ({shortened(reason)}): write or copy it again"
        ) from error


def check_column(source: Input, schema, field: str, types) -> None:
    if field not in schema.names:
        names = shortened(", ".join(map(repr, schema.names)))
        raise UserError(f"{source.path}: holds {names}, expected a column {field!r}: name the text's with --field")
    kind = schema.field(field).type
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
        raise UserError(f"{source.path}: column {field!r} is {kind}, expected text: name the text's with --field")
