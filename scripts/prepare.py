"""Convert text to token shards in llm.c's format, for --train-data and --val-data.

    python scripts/prepare.py my.txt --tokenizer gpt2 --out data/my
    python scripts/prepare.py corpus/ more.jsonl.zst --tokenizer gpt2 --out data/corpus --val-percent 0.5
    python scripts/prepare.py fineweb/*.parquet --out data/fineweb --threads 64

Reads .txt and .jsonl (one document per line, in --field), both also as .gz or .zst (needs the package zstandard), and
.parquet (needs pyarrow). In a folder it reads every such file at any depth, sorted by path; it follows links, skips
hidden files, and lists other files that it skips. A named file with another extension is read as plain text. Each .txt
file, line or row is a document. The end-of-text token goes between documents (a newline with --tokenizer bytes); empty
documents are left out and counted.

The last --val-percent of the characters become the validation split. The tokens are the same as with `train.py --text`.
The files DIR/NAME_train_000000.bin ... and DIR/NAME_val_000000.bin ... do not depend on the number of threads.
manifest.json beside them lists input, options and output, with checksums. DIR is a new folder, which appears when it is
complete: after an interruption, start again. (A killed prepare.py leaves a hidden folder .*.tmp beside DIR.) The input
is read twice, as a stream, so it may be larger than memory. Do not write to it meanwhile: a file that changes is
refused."""

import argparse
import glob
import os
import re
import shlex
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import partial
from itertools import chain, islice
from pathlib import Path

import numpy as np
from tiktoken import Encoding

from dist.console import open_console, say
from gpt2.data.documents import OF_THE_FILES, READ_AS_TEXT, SPLIT_HELP
from gpt2.data.inputs import EMPTY, Input, Remarks, bare_name, find_inputs
from gpt2.data.shards import MAX_COUNT
from gpt2.data.texts import document_start
from gpt2.data.tokenizers import TOKENIZERS, load_tokenizer
from gpt2.errors import UserError, file_errors
from gpt2.files import as_json, new_file, new_folder
from scripts.preparation.batches import Batch, batches, read_pieces, tokenize
from scripts.preparation.countdown import countdown
from scripts.preparation.manifest import FILE, FORMAT, survey, total
from scripts.preparation.shards import write_shards
from scripts.settings.command_line import Parser
from scripts.settings.units import integer, percent
from scripts.training.signals import INTERRUPTED

AHEAD = 2  # batches that a thread has at once: one being tokenized, one waiting
NAME = re.compile(r"[\w.-]+")
NAME_BREAKS = re.compile(r"[^\w.-]+")


def main(arguments: list[str] | None = None) -> int:
    """Run the program. Return the exit status: 2 after a user's mistake, 75 after an interruption."""
    settings = parse(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        prepare(settings)
    except UserError as error:
        print(f"prepare.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("prepare.py: interrupted: nothing is written, start again", file=sys.stderr)
        return INTERRUPTED
    return 0


def prepare(settings: argparse.Namespace) -> None:
    """Write a new folder of shards and their manifest. Raise UserError as the modules in scripts/preparation do."""
    inputs, remarks = find_inputs(settings.inputs)
    encoding = load_tokenizer(settings.tokenizer)
    manifest = how_to_make(settings, encoding)
    with file_errors(settings.out, "cannot write there: give --out a folder that is writable and has room"):
        settings.out.parent.mkdir(parents=True, exist_ok=True)
    with new_folder(settings.out) as folder:
        manifest["inputs"] = survey_all(inputs, settings.field, settings.split_documents, remarks)
        characters = total(manifest["inputs"], "characters")
        border = int(characters * (100 - settings.val_percent) // 100)
        pieces = chain.from_iterable(read_pieces(source, settings.field, settings.split_documents) for source in inputs)
        with countdown("tokenizing", "characters", characters) as advance:
            parts = tokenize_all(batches(pieces, border), encoding, settings.threads, advance)
            manifest["shards"] = write_shards(folder, manifest["options"]["name"], settings.shard_tokens, parts)
        check_enough(manifest["shards"], settings.out, settings.val_percent > 0)
        with new_file(folder / FILE) as file:
            file.write(f"{as_json(manifest, indent=1)}\n".encode())
    report(settings.out, manifest)


def how_to_make(settings: argparse.Namespace, encoding: Encoding) -> dict:
    """Return the first entries of the manifest."""
    options = {
        "field": settings.field,
        "split_documents": settings.split_documents,
        "shard_tokens": settings.shard_tokens,
        "val_percent": float(settings.val_percent),
        "name": settings.name or NAME_BREAKS.sub("-", bare_name(settings.inputs[0])),
    }
    return {
        "format": FORMAT,
        "tokenizer": settings.tokenizer,
        "vocabulary": encoding.n_vocab,
        "separator": document_start(encoding).tolist(),
        "options": options,
    }


def survey_all(inputs: list[Input], field: str, splits: bool, remarks: Remarks) -> list[dict]:
    """Return the manifest's entry of each input, and print remarks. UserError: one cannot be used, or no text."""
    surveyed = []
    with countdown("reading", "bytes", sum(source.bytes for source in inputs)) as advance:
        for source in inputs:
            facts = survey(source, field, splits)
            surveyed.append(facts)
            advance(source.bytes)
            if not facts["characters"]:
                remarks.add(EMPTY, source.path)
            if facts["end_of_text"]:
                remarks.add(OF_THE_FILES, source.path, READ_AS_TEXT)
    if not total(surveyed, "characters"):
        others = f" and {len(surveyed) - 1} more" if len(surveyed) > 1 else ""
        raise UserError(f"{surveyed[0]['path']}{others}: no text in it, expected one document or more: give others")
    if str(remarks):
        say(remarks, on_stderr=True)
    return surveyed


def tokenize_all(
    work: Iterator[Batch], encoding: Encoding, threads: int, advance: Callable[[int], None]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (split, tokens) of all batches in order, while threads tokenize the next ones.

    Threads share the work like processes would, because tiktoken releases Python's lock.
    """
    with ThreadPoolExecutor(threads) as executor:
        started = ((batch.split, batch.characters, executor.submit(tokenize, batch, encoding)) for batch in work)
        waiting = deque(islice(started, AHEAD * threads))
        while waiting:
            split, characters, tokens = waiting.popleft()
            waiting.extend(islice(started, 1))
            yield split, tokens.result()
            advance(characters)


def check_enough(shards: list[dict], out: Path, has_validation: bool) -> None:
    """Raise UserError if a split is too small to train on or to validate with."""
    for split, purpose in (("train", "training"), ("val", "validation")):
        tokens = total((shard for shard in shards if shard["split"] == split), "tokens")
        if tokens < 2 and (split == "train" or has_validation):
            raise UserError(
                f"{out}: {tokens} tokens for {purpose}, expected at least 2: give more text, or another --val-percent"
            )


def report(folder: Path, manifest: dict) -> None:
    inputs = manifest["inputs"]
    name = manifest["options"]["name"]
    empty = total(inputs, "empty_documents")
    print(
        f"{len(inputs)} file(s), {total(inputs, 'documents'):,} document(s), {total(inputs, 'characters'):,} characters"
        + (f"; {empty:,} empty document(s) left out" if empty else "")
    )
    for split, flag in (("train", "--train-data"), ("val", "--val-data")):
        shards = [shard for shard in manifest["shards"] if shard["split"] == split]
        if shards:
            pattern = shlex.quote(f"{glob.escape(str(folder / name))}_{split}_*.bin")
            print(f"{total(shards, 'tokens'):,} tokens in {len(shards)} shard(s): {flag} {pattern}")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    token_count = partial(integer, low=2, high=MAX_COUNT)
    thread_count = partial(integer, low=1, high=4096)
    add = parser.add_argument
    add("inputs", metavar="INPUT", nargs="+", type=Path, help="a file or folder of text")
    add("--out", metavar="DIR", required=True, type=Path, help="new folder for the shards")
    add("--tokenizer", choices=TOKENIZERS, default="gpt2", help="tokenizer (%(default)s)")
    add("--field", default="text", metavar="NAME", help="field of .jsonl and column of .parquet to read (%(default)s)")
    add("--split-documents", action="store_true", help=SPLIT_HELP)
    add("--name", type=plain_name, metavar="PREFIX", help="prefix of the shards' names (from the first INPUT)")
    add("--shard-tokens", type=token_count, default=10**8, metavar="N", help="tokens per shard (%(default)s)")
    validation = "percentage of the text for validation (%(default)s)"
    add("--val-percent", type=percent, default=Fraction(10), metavar="PERCENT", help=validation)
    cores = len(os.sched_getaffinity(0))
    tokenizing = "threads that tokenize (all cores: %(default)s)"
    add("--threads", "--processes", type=thread_count, default=cores, metavar="N", help=tokenizing)
    return parser.parse_args(arguments)


def plain_name(text: str) -> str:
    if not NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r}, expected letters, digits and _ . - only")
    return text


if __name__ == "__main__":
    open_console()
    sys.exit(main())
