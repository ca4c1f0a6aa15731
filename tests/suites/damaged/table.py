"""Every format that is read, by name. A new one is a function that makes a `Damaged`, and a row here."""

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path

from gpt2.data.tokenizers import GPT2_FILES
from gpt2.formats import checkpoint_files, checkpoints
from tests.suites.damaged import huggingface, llmc, runs, texts, trace_files
from tests.support.mutations import Damaged, Mutator
from tests.unit.test_tokenizers import CACHE


def without(package: str) -> str:
    return "" if importlib.util.find_spec(package) else f"the package {package} is not installed"


RANK, MARKER = checkpoint_files.rank_file(1), checkpoints.MARKER
# A function that makes a file of the format in an empty folder.
KINDS: dict[str, Callable[[Path], Damaged]] = {
    "token shard": llmc.shard,
    "llm.c model, float32": partial(llmc.model, stored="float32"),
    "llm.c model, bfloat16": partial(llmc.model, stored="bfloat16"),
    "HellaSwag": llmc.evaluation,
    "checkpoint, bytes": partial(llmc.checkpoint, name=RANK, mutate=partial(llmc.of_bytes, head=800)),
    "checkpoint, header": partial(llmc.checkpoint, name=RANK, mutate=Mutator.of_sized_header),
    "checkpoint, marker": partial(llmc.checkpoint, name=MARKER, mutate=Mutator.of_json),
    "checkpoint in pieces, header": partial(llmc.checkpoint_in_pieces, name=RANK, mutate=Mutator.of_sized_header),
    "checkpoint in pieces, marker": partial(llmc.checkpoint_in_pieces, name=MARKER, mutate=Mutator.of_json),
    "Hugging Face, bytes": partial(huggingface.tensors, mutate=huggingface.of_tensors),
    "Hugging Face, header": partial(huggingface.tensors, mutate=Mutator.of_sized_header),
    "Hugging Face, config.json": huggingface.config,
    "Hugging Face, index": huggingface.index,
    "run, config.json": runs.config,
    "run, log.jsonl": runs.log,
    "run, trace": trace_files.trace,
    "run, counters": trace_files.counters,
    "run, clocks.json": trace_files.end_clocks,
    "run, links.json": trace_files.end_links,
    "run, lock.json": runs.lock,
    "log.jsonl on --resume": texts.resumed_log,
    "config.json's tokenizer": texts.tokenizer_of_run,
    "manifest.json": texts.manifest,
    "text, .jsonl": texts.json_lines,
    "text, .gz": texts.gz,
    "text, .zst": texts.zst,
    "text, .parquet": texts.parquet,
    "GPT-2's vocabulary": texts.vocabulary,
}
# What this machine lacks for a format, if anything.
MISSING = {
    "text, .zst": without("zstandard"),
    "text, .parquet": without("pyarrow"),
    "GPT-2's vocabulary": "" if (CACHE / GPT2_FILES["vocab.bpe"]).exists() else f"no files in {CACHE}",
}
