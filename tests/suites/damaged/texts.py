"""What prepare.py reads, and what tells a tokenizer, to be damaged."""

import gzip
import json
import os
import shutil
from functools import partial
from pathlib import Path
from unittest import mock

import tiktoken.load
import tiktoken.registry

from gpt2.data.documents import read_chunks
from gpt2.data.inputs import file_of
from gpt2.data.tokenizers import GPT2_FILES, load_tokenizer
from gpt2.errors import UserError
from scripts.settings.tokenizer import choose_tokenizer, tokenizer_of_shards
from scripts.training.folder import RunFolder
from tests.suites.damaged.huggingface import of_json
from tests.suites.damaged.llmc import of_bytes
from tests.suites.damaged.runs import measured_run, of_lines
from tests.support.mutations import Damaged, Mutator
from tests.support.prepared import nonsense
from tests.unit.test_tokenizers import CACHE

DOCUMENTS = [nonsense(40, seed) for seed in range(6)]


def packed_text(folder: Path, name: str, pack) -> Damaged:
    """Their checksums cover all that is packed: what is read is what was written."""
    path = folder / name
    path.write_bytes(pack("".join(DOCUMENTS).encode()))

    def read():
        return "".join(text for _, text in read_chunks(file_of(path), "text"))

    def judge(mutant, value):
        assert value in (None, "".join(DOCUMENTS))

    return Damaged(path, partial(of_bytes, head=20), read, UserError, judge)


def gz(folder: Path) -> Damaged:
    return packed_text(folder, "a.txt.gz", partial(gzip.compress, mtime=0))


def zst(folder: Path) -> Damaged:
    import zstandard

    return packed_text(folder, "a.txt.zst", zstandard.ZstdCompressor(write_checksum=True).compress)


def json_lines(folder: Path) -> Damaged:
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps({"id": 1, "text": text}) + "\n" for text in DOCUMENTS))

    def judge(mutant, value):
        if value is not None:
            lines = [json.loads(line)["text"] for line in mutant.split(b"\n") if line.strip()]
            assert value == [line or "" for line in lines]

    def read():
        return [text for _, text in read_chunks(file_of(path), "text")]

    return Damaged(path, of_lines, read, UserError, judge, least=5)


def parquet(folder: Path) -> Damaged:
    """Of a page that holds no checksum another text is another text; it must be text."""
    import pyarrow
    from pyarrow import parquet

    path = folder / "a.parquet"
    parquet.write_table(pyarrow.table({"text": DOCUMENTS}), path)

    def read():
        return [text for _, text in read_chunks(file_of(path), "text")]

    def judge(mutant, value):
        assert value is None or all(isinstance(text.encode(), bytes) for text in value)

    return Damaged(path, of_bytes_of_parquet, read, UserError, judge)


def of_bytes_of_parquet(mutator: Mutator, content: bytes) -> bytes:
    return mutator.of_bytes(content, 0)


def manifest(folder: Path) -> Damaged:
    """What it says of the shards beside it: their tokenizer."""
    path = folder / "manifest.json"
    path.write_text(json.dumps({"tokenizer": "bytes"}))
    shard = folder / "a.bin"
    shard.touch()

    def judge(mutant, value):
        assert value in (None, "bytes", "gpt2")

    return Damaged(path, of_json, lambda: tokenizer_of_shards(str(shard)), UserError, judge, least=5)


def vocabulary(folder: Path) -> Damaged:
    """GPT-2's, in tiktoken's cache, without a network: its checksum is known."""
    for key in GPT2_FILES.values():
        shutil.copy(CACHE / key, folder / key)

    def no_network(address):
        raise ConnectionError(f"no route\nto {address}")

    def read():
        cache = mock.patch.dict(os.environ, TIKTOKEN_CACHE_DIR=str(folder))
        encodings = mock.patch.dict(tiktoken.registry.ENCODINGS, clear=True)
        with cache, encodings, mock.patch.object(tiktoken.load, "read_file", no_network):
            return load_tokenizer("gpt2").encode("Hello, world")

    def judge(mutant, value):
        assert value in (None, [15496, 11, 995])

    path = folder / GPT2_FILES["vocab.bpe"]
    return Damaged(path, partial(of_bytes, head=1000), read, UserError, judge, named=folder)


def tokenizer_of_run(folder: Path) -> Damaged:
    """What config.json says of it, for sample.py and evaluate.py; where it says nothing, the vocabulary decides."""
    path = folder / "config.json"
    path.write_text(json.dumps({"settings": {"strategy": "sliced", "tokenizer": "bytes"}, "ranks": [{"rank": 0}]}))

    def judge(mutant, value):
        assert value in (None, "bytes")

    return Damaged(path, of_json, lambda: choose_tokenizer(None, folder, 256).name, UserError, judge, least=5)


def resumed_log(folder: Path) -> Damaged:
    """--resume keeps the log's lines up to a step, each as it stood, and drops what a crash has torn."""
    made, resumed = measured_run(folder), folder / "resumed"
    (made / "checkpoints").mkdir()

    def read():
        shutil.rmtree(resumed, ignore_errors=True)
        shutil.copytree(made, resumed)
        run_folder = RunFolder(resumed, lambda: None, 2)
        run_folder.set_config({}, [], "", {})
        run_folder.begin()
        return (resumed / "log.jsonl").read_bytes()

    def judge(mutant, value):
        kept = value.splitlines(keepends=True)
        assert set(kept) <= set(mutant.splitlines(keepends=True))
        assert all(json.loads(line)["step"] <= 2 for line in kept)

    return Damaged(made / "log.jsonl", of_lines, read, UserError, judge, least=10)
