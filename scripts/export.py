"""Export a run's weights or traces for other tools.

    python scripts/export.py runs/sliced --format llmc --out gpt2.bin           the last checkpoint's weights for llm.c
    python scripts/export.py runs/sliced --format huggingface --out my-gpt2     for transformers, with the tokenizer
    python scripts/export.py runs/sliced --format paraver --out sliced.prv      with sliced.pcf and sliced.row beside it
    python scripts/export.py runs/sliced --format perfetto --out sliced.json.gz for ui.perfetto.dev, chrome://tracing
    python scripts/export.py runs/sliced --format otf2 --out sliced.otf2        a folder for Vampir and Score-P's tools
    python scripts/export.py runs/sliced --format otf2 --start 2 --out two.otf2     the second start of a resumed run

A trace whose name ends in .gz is compressed. RUN may also be a file or folder of weights, to convert their format.
"""

import argparse
import sys
from pathlib import Path

import tiktoken

from dist.console import open_console
from gpt2.data.tokenizers import TOKENIZERS
from gpt2.errors import UserError
from gpt2.files import new_folder, place_of_file, replacing_in
from gpt2.formats import huggingface_export, llmc, weights
from gpt2.formats.stored_numbers import WRITTEN
from scripts.settings.command_line import Parser
from scripts.settings.memory import check_parameters
from scripts.settings.sequence_length import untrained_positions
from scripts.settings.tokenizer import choose_tokenizer
from traces import RunError, read_run
from traces.export import chrome, paraver
from traces.read.runs import Run

TRACES = ("paraver", "perfetto", "otf2")
FORMATS = ("llmc", "huggingface", *TRACES)
# Flags that only some formats accept.
FLAGS = {
    "dtype": ("llmc", "huggingface"),
    "tokenizer": ("huggingface",),
    "start": TRACES,
}


def main(arguments: list[str] | None = None) -> int:
    """Run the program. Return the exit status: 2 if the run cannot be read or the output cannot be written."""
    settings = parse(arguments)
    try:
        paths = export(settings)
    except (RunError, UserError) as error:
        print(f"export.py: error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"export.py: error: {settings.out} cannot be written ({error}); choose another --out", file=sys.stderr)
        return 2
    for path in paths:
        print(path)
    return 0


def export(settings: argparse.Namespace) -> list[Path]:
    """Write the requested format and return the paths. Raise RunError, UserError or OSError."""
    if settings.format in TRACES:
        return export_otf2(settings) if settings.format == "otf2" else export_trace(settings)
    check_parameters(settings.run, weights.read_config(settings.run))
    parameters = weights.load(settings.run)
    stored = settings.dtype or WRITTEN[0]
    if line := untrained_positions(settings.run, parameters.layout.config.context):
        print(f"export.py: warning: {line}", file=sys.stderr)
    if settings.format == "llmc":
        llmc.write_parameters(settings.out, parameters, stored=stored)
        return [settings.out]
    tokenizer, why_none = exported_tokenizer(settings.tokenizer, settings.run, parameters.layout.config.vocab_size)
    huggingface_export.write_parameters(settings.out, parameters, stored=stored, tokenizer=tokenizer)
    if why_none:
        print(f"export.py: without the tokenizer's files (such as tokenizer.json): {why_none}", file=sys.stderr)
    return sorted(settings.out.iterdir())


def exported_tokenizer(asked: str | None, path: Path, vocab_size: int) -> tuple[tiktoken.Encoding | None, str]:
    """Return the model's tokenizer and ""; or None and the reason: the tokenizer is unknown, or its files are missing.

    asked: --tokenizer. Raise UserError if that tokenizer is not available or has more tokens than the model.
    """
    try:
        return choose_tokenizer(asked, path, vocab_size), ""
    except UserError as error:
        if asked:
            raise
        return None, str(error)


def export_trace(settings: argparse.Namespace) -> list[Path]:
    """Write three files for Paraver or one for Perfetto. Return the paths."""
    out = settings.out
    write_trace = paraver.export if settings.format == "paraver" else chrome.export
    if not out.name or (settings.format == "perfetto" and out.exists()):
        place_of_file(out)  # fail before the minutes that a long trace takes
    run = read_traced_run(settings)
    with replacing_in(out.parent) as folder:
        written = write_trace(run, folder / out.name)
    return [out.parent / path.name for path in written]


def export_otf2(settings: argparse.Namespace) -> list[Path]:
    """Write a folder in OTF2. Raise UserError if the package otf2 is missing."""
    try:
        from traces.export import otf2
    except ImportError as error:
        raise UserError(
            f"--format otf2 needs the package otf2, which cannot be imported ({error}): pip install -e '.[otf2]'"
        ) from None
    run = read_traced_run(settings)
    with new_folder(settings.out) as folder:
        otf2.export(run, folder)
    return [settings.out / "traces.otf2"]


def read_traced_run(settings: argparse.Namespace) -> Run:
    """Read the run and print which of its files are missing."""
    run = read_run(settings.run, allow_missing=True, start=settings.start)
    for text in run.missing:
        print(f"export.py: {text}", file=sys.stderr)
    return run


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("run", metavar="RUN", type=Path, help="a run folder, or a file or folder of weights")
    add("--format", choices=FORMATS, required=True, help="format to write")
    add("--out", metavar="PATH", type=Path, required=True, help="file or folder to write")
    add("--dtype", choices=WRITTEN, help=f"number format of the weights ({WRITTEN[0]}); rounded to nearest even")
    add("--tokenizer", choices=TOKENIZERS, help="huggingface: add the files of this tokenizer (the model's tokenizer)")
    add("--start", type=int, metavar="K", help="traces: which start of a resumed run (the last)")
    settings = parser.parse_args(arguments)
    for name, formats in FLAGS.items():
        if getattr(settings, name) is not None and settings.format not in formats:
            flag = name.replace("_", "-")
            parser.error(f"--{flag} with --format {settings.format}: it is for --format {' or '.join(formats)}")
    return settings


if __name__ == "__main__":
    open_console()
    sys.exit(main())
