"""What the tests of prepare.py share: nonsense to prepare, the script in this process, and what it wrote."""

import json
import random
import sys
from pathlib import Path

import numpy as np

from gpt2.data.shards import open_shard
from scripts.prepare import parse, prepare
from tests.unit.test_tokenizers import CACHE

SCRIPTS = Path(__file__).parents[2] / "scripts"


# What GPT-2's pattern and Python disagree about, or treats on its own: contractions, kinds of white space, no letters.
FRAGMENTS = ["a", "b c", "'ll", "'s", "'", "1", "23", "é", "字", "字。", "🙂", "<|endoftext|>", ".", "!?"]
FRAGMENTS += [" ", "  ", "\t", "\n", "\r\n", "\n\n\n", "\x1c", "\x85", "\xa0", "\u2028", "\u3000"]


def use_vocabulary(monkeypatch) -> None:
    """GPT-2's files, where this machine has them."""
    if CACHE.is_dir():
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(CACHE))


def nonsense(length: int, seed: int = 0) -> str:
    return "".join(random.Random(seed).choices(FRAGMENTS, k=length))


def run(*arguments, tokenizer="bytes", threads=1) -> None:
    """prepare.py in this process."""
    prepare(parse([*map(str, arguments), "--tokenizer", tokenizer, "--threads", str(threads)]))


def command(*arguments) -> list[str]:
    return [sys.executable, str(SCRIPTS / "prepare.py"), *map(str, arguments), "--tokenizer", "bytes"]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def tokens_in(folder: Path, split: str) -> np.ndarray:
    return np.concatenate([open_shard(path)[:] for path in sorted(folder.glob(f"*_{split}_*.bin"))])


def manifest_of(folder: Path) -> dict:
    return json.loads((folder / "manifest.json").read_text())


def write_jsonl(path: Path, documents, field="text") -> Path:
    path.write_text("".join(json.dumps({"id": 1, field: text}) + "\n\n" for text in documents))
    return path


def write_folder(path: Path, documents) -> Path:
    path.mkdir()
    for number, document in enumerate(documents):
        (path / f"{number:03}.txt").write_bytes(document.encode())
    return path
