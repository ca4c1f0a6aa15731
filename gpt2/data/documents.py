"""Read the documents of a text file as chunks.

A chunk is (begins, text); `begins` is true for the first chunk of a document. A .txt file is one document in several
chunks, so that it need not fit in memory. A document of a .jsonl or .parquet file is one chunk. (True, "") is an empty
document. A byte order mark at the beginning of a .txt file or of a .jsonl line is skipped.
"""

import codecs
import json
from collections.abc import Iterable, Iterator
from itertools import chain

from gpt2.data.inputs import BLOCK_BYTES, Input, blocks
from gpt2.data.tokenizers import END_OF_TEXT
from gpt2.errors import UserError

Chunk = tuple[bool, str]

# TinyStories spells out <|endoftext|>. It is ordinary text, unless --split-documents is given.
SPLIT_HELP = f"end a document at each {END_OF_TEXT} in the text (else it is ordinary text)"
READ_AS_TEXT = f"{END_OF_TEXT} is read as ordinary text; with --split-documents a document ends there"
OF_THE_FILES = "of the files"  # for Remarks

SAMPLE_BYTES = 1 << 10  # read from a file's beginning to detect its encoding
OTHER_MARKS = {  # the order matters: the mark of UTF-32LE begins with that of UTF-16LE
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
LONGEST_LINE = 1 << 28  # bytes: a .jsonl file with a longer line is refused, to limit memory
PARQUET_ROWS = 64  # rows that are decoded together


def read_chunks(source: Input, field: str, splits: bool = False) -> Iterator[Chunk]:
    """Yield the chunks of the file's documents. field: the field of .jsonl, the column of .parquet.

    splits: each <|endoftext|> in the text also ends a document.
    UserError: unreadable, damaged, not UTF-8 (which byte, line or row), a line that is not JSON or lacks the field.
    """
    if source.kind == ".txt":
        chunks = read_text(source)
    else:
        texts = read_jsonl(source, field) if source.kind == ".jsonl" else read_parquet(source, field)
        chunks = ((True, text) for text in texts)
    return split_documents(chunks) if splits else chunks


def split_documents(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """Yield chunks in which each end-of-text ends a document. Neither document includes it.

    A possible beginning of an end-of-text is held back until the next chunk.
    """
    begins = False
    held = ""
    for begins_document, chunk in chunks:
        if begins_document:
            if begins or held:
                yield begins, held
            begins = True
            held = ""
        *ended, held = (held + chunk).split(END_OF_TEXT)
        for text in ended:
            yield begins, text
            begins = True
        complete = len(held) - unfinished(held)
        if complete:
            yield begins, held[:complete]
            begins = False
            held = held[complete:]
    if begins or held:
        yield begins, held


def unfinished(text: str) -> int:
    """Return how many characters at the end of the text may begin an end-of-text."""
    longest = min(len(text), len(END_OF_TEXT) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(END_OF_TEXT[:size])), 0)


def read_text(source: Input) -> Iterator[Chunk]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    position = 0
    begins = True
    for block in chain(utf8_blocks(source), [b""]):
        if not position and block.startswith(codecs.BOM_UTF8):
            position = len(codecs.BOM_UTF8)
            block = block[position:]
        held = decoder.getstate()[0]  # the first bytes of a character that ends in this block
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


def utf8_blocks(source: Input) -> Iterator[bytes]:
    """Yield the file's bytes in blocks, the first of at least SAMPLE_BYTES. UserError: it is UTF-16 or UTF-32."""
    beginning = b""
    others = blocks(source)
    for block in others:
        beginning += block
        if len(beginning) >= SAMPLE_BYTES:
            break
    if name := other_encoding(beginning[:SAMPLE_BYTES]):
        raise UserError(f"{source.path}: {name} text, expected UTF-8: convert the file with iconv -f {name} -t UTF-8")
    if beginning:
        yield beginning
    yield from others


def other_encoding(beginning: bytes) -> str | None:
    """Return iconv's name of UTF-16 or UTF-32, or None. UTF-16 without a mark is detected by its zeros."""
    for mark, name in OTHER_MARKS.items():
        if beginning.startswith(mark):
            return name
    even = beginning[::2]
    odd = beginning[1::2]
    for name, high, low in (("UTF-16LE", odd, even), ("UTF-16BE", even, odd)):
        if 2 * high.count(0) > len(high) and 2 * low.count(0) < len(low):
            return name
    return None


def read_jsonl(source: Input, field: str) -> Iterator[str]:
    for number, line in enumerate(read_lines(source), 1):
        line = line.removeprefix(codecs.BOM_UTF8)
        if line.strip():
            try:
                yield text_of_line(line, field)
            except UserError as error:
                raise UserError(f"{source.path}: line {number} {error}") from error


def read_lines(source: Input) -> Iterator[bytes]:
    """Yield the lines without their ends, holding only one line in memory."""
    begun = []
    size = 0
    for block in utf8_blocks(source):
        *complete, rest = block.split(b"\n")
        if complete:
            yield b"".join([*begun, complete[0]])
            yield from complete[1:]
            begun = []
            size = 0
        begun.append(rest)
        size += len(rest)
        if size > LONGEST_LINE:
            raise UserError(
                f"{source.path}: a line is longer than {LONGEST_LINE} bytes, expected one JSON object on each: "
                "write every document on a line of its own"
            )
    yield b"".join(begun)


def text_of_line(line: bytes, field: str) -> str:
    """Return the text in a line of JSON. Messages of UserErrors continue "line 1 "."""
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
        raise UserError(f"holds {names}, expected the field {field!r}: name the text's with prepare.py --field")
    text = "" if found[field] is None else found[field]
    if not isinstance(text, str):
        raise UserError(f"has as {field!r} {kind_of(text)}, expected text: name the text's with prepare.py --field")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # an escape of half a surrogate pair, which UTF-8 cannot encode
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
                # Not column 0: for "a.b", pyarrow also reads the field b of a column of structures, a.
                for value in batch.column(batch.schema.get_field_index(field)):
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
    count = schema.names.count(field)
    if not count:
        names = shortened(", ".join(map(repr, schema.names)) or "no column")
        raise UserError(
            f"{source.path}: holds {names}, expected a column {field!r}: name the text's with prepare.py --field"
        )
    if count > 1:
        raise UserError(f"{source.path}: holds {count} columns {field!r}, expected one: rename the others")
    kind = schema.field(field).type
    content = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_string(content) or types.is_large_string(content) or types.is_string_view(content)):
        raise UserError(
            f"{source.path}: column {field!r} is {kind}, expected text: name the text's with prepare.py --field"
        )
