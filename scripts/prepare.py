"""Convert text to token shards in llm.c's format, for --train-data and --val-data.

    python scripts/prepare.py my.txt --tokenizer gpt2 --out data/my
    python scripts/prepare.py corpus/ more.jsonl.zst --tokenizer gpt2 --out data/corpus --val-percent 0.5
    python scripts/prepare.py fineweb/*.parquet --out data/fineweb --processes 64

Reads .txt and .jsonl (one document per line, in --field), both also as .gz or .zst (needs the package zstandard), and
.parquet (needs pyarrow). In a folder it reads every such file at any depth, sorted by path; it follows links, skips
hidden files, and lists other files that it skips. A named file with another extension is read as plain text. Each .txt
file, line or row is a document. The end-of-text token goes between documents (a newline with --tokenizer bytes); empty
documents are left out and counted.

The last --val-percent of the characters become the validation split. The tokens are the same as with `train.py --text`.
The files DIR/NAME_train_000000.bin ... and DIR/NAME_val_000000.bin ... do not depend on the number of processes.
manifest.json beside them lists input, options and output, with checksums. If interrupted, run the same command again:
it continues after the last complete shard. The input is read twice, as a stream, so it may be larger than memory. Do
not write to it meanwhile: a file that changes is refused, and the shards made from it are removed."""

import argparse
import glob
import os
import re
import shlex
import signal
import sys
from fractions import Fraction
from functools import partial
from itertools import chain, islice
from pathlib import Path

from dist.console import open_console, say
from gpt2.data.documents import OF_THE_FILES, READ_AS_TEXT, SPLIT_HELP
from gpt2.data.inputs import EMPTY, Input, InputChanged, bare_name, find_inputs
from gpt2.data.shards import MAX_COUNT
from gpt2.data.texts import document_start
from gpt2.data.tokenizers import TOKENIZERS
from gpt2.errors import UserError
from scripts.preparation.batches import BATCH_CHARACTERS, batches, encoding_of, read_pieces, tokenize
from scripts.preparation.countdown import Countdown
from scripts.preparation.manifest import (
    FORMAT,
    READING,
    check_made_alike,
    check_read_alike,
    check_same_inputs,
    owned_folder,
    read_manifest,
    survey,
    take_back,
    total,
    whole_shards,
    write_manifest,
)
from scripts.preparation.processes import ordered_map
from scripts.preparation.shards import ShardWriter
from scripts.settings.command_line import Parser
from scripts.settings.units import integer, percent
from scripts.training.signals import INTERRUPTED

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
        print("prepare.py: interrupted: the same command goes on from the last complete shard", file=sys.stderr)
        return INTERRUPTED
    return 0


def prepare(settings: argparse.Namespace) -> None:
    """Write the missing shards of the folder. Raise UserError as the modules in scripts/preparation do."""
    inputs, remarks = find_inputs(settings.inputs)
    making = how_to_make(settings)
    with owned_folder(settings.out), ordered_map(settings.processes) as mapped:
        found = read_manifest(settings.out)
        if found:
            check_made_alike(settings.out, found, making)
        surveyed = survey_all(inputs, settings.field, settings.split_documents, mapped)
        for source, facts in zip(inputs, surveyed, strict=True):
            if not facts["characters"]:
                remarks.add(EMPTY, source.path)
            if facts["end_of_text"]:
                remarks.add(OF_THE_FILES, source.path, READ_AS_TEXT)
        if str(remarks):
            say(remarks, on_stderr=True)
        shards = []
        if found:
            check_same_inputs(settings.out, found, surveyed)
            shards = whole_shards(settings.out, found["shards"])
        manifest = {"format": FORMAT, "reading": READING, **making}
        manifest |= {"inputs": surveyed, "shards": shards, "complete": False}
        if found and found["complete"] and len(shards) == len(found["shards"]):
            print(f"{settings.out}: complete already, its checksums are right")
        else:
            if found:
                check_read_alike(settings.out, found)
            kept = len(shards)
            try:
                write_shards(settings, inputs, manifest, mapped)
            except InputChanged:  # the new shards may hold parts of the new text
                take_back(settings.out, manifest, kept)
                raise
    report(settings.out, manifest)


def how_to_make(settings: argparse.Namespace) -> dict:
    """Return the manifest's tokenizer and options. Raise UserError if the tokenizer is not available."""
    options = {
        "field": settings.field,
        "split_documents": settings.split_documents,
        "shard_tokens": settings.shard_tokens,
        "val_percent": float(settings.val_percent),
        "name": settings.name or NAME_BREAKS.sub("-", bare_name(settings.inputs[0])),
        "batch_characters": BATCH_CHARACTERS,
    }
    encoding = encoding_of(settings.tokenizer)
    separator = document_start(encoding).tolist()
    return dict(tokenizer=settings.tokenizer, vocabulary=encoding.n_vocab, separator=separator, options=options)


def survey_all(inputs: list[Input], field: str, splits: bool, mapped) -> list[dict]:
    """Return the manifest's entry of each input. Raise UserError if one cannot be used, or if there is no text."""
    surveyed = []
    with Countdown("reading", "bytes", sum(os.path.getsize(source.path) for source in inputs)) as progress:
        for facts in mapped(partial(survey, field, splits), inputs):
            surveyed.append(facts)
            progress.advance(facts["bytes"])
    if not total(surveyed, "characters"):
        others = f" and {len(surveyed) - 1} more" if len(surveyed) > 1 else ""
        raise UserError(f"{surveyed[0]['path']}{others}: no text in it, expected one document or more: give others")
    return surveyed


def write_shards(settings: argparse.Namespace, inputs: list[Input], manifest: dict, mapped) -> None:
    """Write the shards that the manifest lacks, and the manifest after each shard."""

    def completed(shard: dict) -> None:
        manifest["shards"].append(shard)
        write_manifest(settings.out, manifest)

    write_manifest(settings.out, manifest)
    characters = total(manifest["inputs"], "characters")
    pieces = chain.from_iterable(read_pieces(source, settings.field, settings.split_documents) for source in inputs)
    work = batches(pieces, int(characters * (100 - settings.val_percent) // 100))
    number, first = manifest["shards"][-1]["end"] if manifest["shards"] else (0, 0)
    options = manifest["options"]
    writer = ShardWriter(settings.out, options["name"], options["shard_tokens"], manifest["shards"], completed)
    skipped = sum(batch.characters for batch in islice(work, number))
    with writer, Countdown("tokenizing", "characters", characters, skipped) as progress:
        for split, size, tokens in mapped(partial(tokenize, settings.tokenizer), work):
            writer.add(split, tokens, number, first)
            number = number + 1
            first = 0
            progress.advance(size)
        writer.finish(number)
    for split, purpose in (("train", "training"), ("val", "validation")):
        tokens = total((shard for shard in manifest["shards"] if shard["split"] == split), "tokens")
        if tokens < 2 and (split == "train" or settings.val_percent):
            raise UserError(
                f"{settings.out}: {tokens} tokens for {purpose}, expected at least 2: remove the folder and give more "
                "text, or another --val-percent"
            )
    manifest["complete"] = True
    write_manifest(settings.out, manifest)


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
    process_count = partial(integer, low=1, high=4096)
    add = parser.add_argument
    add("inputs", metavar="INPUT", nargs="+", type=Path, help="a file or folder of text")
    add("--out", metavar="DIR", required=True, type=Path, help="folder for the shards")
    add("--tokenizer", choices=TOKENIZERS, default="gpt2", help="tokenizer (%(default)s)")
    add("--field", default="text", metavar="NAME", help="field of .jsonl and column of .parquet to read (%(default)s)")
    add("--split-documents", action="store_true", help=SPLIT_HELP)
    add("--name", type=plain_name, metavar="PREFIX", help="prefix of the shards' names (from the first INPUT)")
    add("--shard-tokens", type=token_count, default=10**8, metavar="N", help="tokens per shard (%(default)s)")
    validation = "percentage of the text for validation (%(default)s)"
    add("--val-percent", type=percent, default=Fraction(10), metavar="PERCENT", help=validation)
    cores = len(os.sched_getaffinity(0))
    add("--processes", type=process_count, default=cores, metavar="N", help="processes (all cores: %(default)s)")
    return parser.parse_args(arguments)


def plain_name(text: str) -> str:
    if not NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r}, expected letters, digits and _ . - only")
    return text


if __name__ == "__main__":
    open_console()
    sys.exit(main())
