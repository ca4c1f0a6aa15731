"""Part of make_docs.py: prepare.py beside a plain loop over tiktoken's encode_ordinary, both in one process."""

import json
import statistics
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np

from gpt2.data.texts import read_documents
from gpt2.data.tokenizers import load_tokenizer
from scripts.machine.host import machine, versions
from scripts.makers.pages.page import replace_block
from scripts.prepare import main as run_prepare

ROUNDS = 25
HEADER = ["| input | documents | prepare.py, MB/s | plain loop, MB/s | times as fast |", "|---|---|---|---|---|"]


def prepare(folder: Path, _) -> None:
    """The embedded corpus as one text, and each of its paragraphs as a line of JSON."""
    _, (corpus,) = read_documents(None)
    paragraphs = list(filter(str.strip, corpus.split("\n\n")))
    text, lines = folder / "corpus.txt", folder / "corpus.jsonl"
    text.write_text(corpus)
    lines.write_text("".join(json.dumps({"text": paragraph}) + "\n" for paragraph in paragraphs))
    rows = [*HEADER, row("one text", text, 1), row("lines of JSON", lines, len(paragraphs))]
    where, packages = machine(), versions("numpy", "tiktoken")
    named = ", ".join(f"{name} {version}" for name, version in packages.items())
    rows += [
        "",
        f"Python's standard library, {len(corpus.encode()) / 1e6:.1f} MB; `--tokenizer gpt2 --processes 1`; medians of "
        f"{ROUNDS} rounds in turn. Measured on {where['processor']}, {where['cores']} cores, with {named}.",
    ]
    replace_block("docs/benchmarks.md", "prepare", "\n".join(rows))


def row(name: str, path: Path, documents: int) -> str:
    """Each round one after the other, the first round not counted; the ratio is the median of the rounds' own."""
    size = sum(len(text.encode()) for text in texts_of(path)) / 1e6
    rounds = [measure(path, number) for number in range(ROUNDS + 1)][1:]
    ours, plain = (statistics.median(seconds) for seconds in zip(*rounds, strict=True))
    ratio = statistics.median(plain / ours for ours, plain in rounds)
    return f"| {name} | {documents:,} | {size / ours:.1f} | {size / plain:.1f} | {ratio:.2f} |"


def measure(path: Path, number: int) -> tuple[float, float]:
    """Seconds of prepare.py and of the plain loop; every second round begins with the loop."""
    contenders = [with_prepare, with_a_loop]
    seconds = {}
    for contender in contenders if number % 2 else contenders[::-1]:
        begin = time.perf_counter()
        contender(path, path.parent / f"{contender.__name__}-{path.suffix[1:]}-{number}")
        seconds[contender] = time.perf_counter() - begin
    return seconds[with_prepare], seconds[with_a_loop]


def with_prepare(path: Path, out: Path) -> None:
    with redirect_stdout(StringIO()):
        code = run_prepare([str(path), "--out", str(out), "--tokenizer", "gpt2", "--processes", "1"])
    if code:
        raise SystemExit(code)


def with_a_loop(path: Path, out: Path) -> None:
    """As such a script is mostly written: a list of tokens, the end-of-text token before each document."""
    encoding, tokens = load_tokenizer("gpt2"), []
    for text in texts_of(path):
        tokens.append(encoding.eot_token)
        tokens += encoding.encode_ordinary(text)
    np.array(tokens, np.uint16).tofile(out)


def texts_of(path: Path):
    if path.suffix == ".txt":
        yield path.read_text()
        return
    with path.open() as file:
        for line in file:
            yield json.loads(line)["text"]
