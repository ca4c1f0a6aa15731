"""Every format that is read, by name. A new one is a function that makes a `Damaged`, and a row here."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gpt2.data.tokenizers import GPT2_FILES
from gpt2.formats import checkpoint_files, checkpoints
from tests.suites.damaged import huggingface, llmc, runs, texts, trace_files
from tests.support.mutations import Damaged, Mutator
from tests.unit.test_tokenizers import CACHE


@dataclass(frozen=True)
class Kind:
    """make(folder): a file of the format in an empty folder. other: what may be read of it that was not written there.

    missing: what this machine lacks for it.
    """

    make: Callable[[Path], Damaged]
    other: str
    missing: str = ""


def without(package: str) -> str:
    return "" if importlib.util.find_spec(package) else f"the package {package} is not installed"


RANK, MARKER = checkpoint_files.rank_file(1), checkpoints.MARKER
WEIGHTS = "a weight has no checksum: it is the one that stands there"
NOTHING = "nothing: it has checksums"
MEASURED = "a time or a number has no checksum: it is the one that stands there"
KINDS = {
    "token shard": Kind(llmc.shard, "a token has no checksum: it is the one that stands there"),
    "llm.c model, float32": Kind(partial(llmc.model, stored="float32"), WEIGHTS),
    "llm.c model, bfloat16": Kind(partial(llmc.model, stored="bfloat16"), WEIGHTS),
    "HellaSwag": Kind(llmc.evaluation, "a token has no checksum: it is the one that stands there"),
    "checkpoint, bytes": Kind(partial(llmc.checkpoint, name=RANK, mutate=partial(llmc.of_bytes, head=800)), NOTHING),
    "checkpoint, header": Kind(partial(llmc.checkpoint, name=RANK, mutate=Mutator.of_sized_header), NOTHING),
    "checkpoint, marker": Kind(partial(llmc.checkpoint, name=MARKER, mutate=Mutator.of_json), NOTHING),
    "checkpoint in pieces, header": Kind(
        partial(llmc.checkpoint_in_pieces, name=RANK, mutate=Mutator.of_sized_header), NOTHING
    ),
    "checkpoint in pieces, marker": Kind(
        partial(llmc.checkpoint_in_pieces, name=MARKER, mutate=Mutator.of_json), NOTHING
    ),
    "Hugging Face, bytes": Kind(partial(huggingface.tensors, mutate=huggingface.of_tensors), WEIGHTS),
    "Hugging Face, header": Kind(partial(huggingface.tensors, mutate=Mutator.of_sized_header), WEIGHTS),
    "Hugging Face, config.json": Kind(huggingface.config, "heads, and what no reader needs: the tensors say the rest"),
    "Hugging Face, index": Kind(huggingface.index, "nothing: the tensors say where they are"),
    "run, config.json": Kind(runs.config, MEASURED),
    "run, log.jsonl": Kind(runs.log, MEASURED),
    "run, trace": Kind(trace_files.trace, MEASURED),
    "run, calls": Kind(trace_files.calls, MEASURED),
    "run, counters": Kind(trace_files.counters, MEASURED),
    "run, clocks.json": Kind(trace_files.end_clocks, MEASURED),
    "run, links.json": Kind(trace_files.end_links, MEASURED),
    "run, lock.json": Kind(runs.lock, "a lock has no checksum: it is the one that stands there"),
    "log.jsonl on --resume": Kind(texts.resumed_log, "lines that are gone: the log is for people to read"),
    "config.json's tokenizer": Kind(texts.tokenizer_of_run, "nothing"),
    "manifest.json": Kind(texts.manifest, NOTHING),
    "text, .jsonl": Kind(texts.json_lines, "a text has no checksum: it is the one that stands there"),
    "text, .gz": Kind(texts.gz, NOTHING),
    "text, .zst": Kind(texts.zst, NOTHING, without("zstandard")),
    "text, .parquet": Kind(texts.parquet, "a text has no checksum: it is one all the same", without("pyarrow")),
    "GPT-2's vocabulary": Kind(
        texts.vocabulary, NOTHING, "" if (CACHE / GPT2_FILES["vocab.bpe"]).exists() else f"no files in {CACHE}"
    ),
}
