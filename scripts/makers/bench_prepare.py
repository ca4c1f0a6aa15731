"""Text to tokens by prepare.py beside a plain loop over tiktoken's encode_ordinary, in turns, in one process.

    python scripts/makers/bench_prepare.py --json prepare.json

The text is Python's own sources, whole and as a line of JSON for each of its paragraphs. Needs GPT-2's vocabulary.
"""

import argparse
import json
import runpy
import statistics
import sys
import tempfile
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np

from dist.console import open_console
from gpt2.data.corpora import python_sources
from gpt2.data.tokenizers import load_tokenizer
from gpt2.files import write_json
from scripts.machine.host import machine, versions

PREPARE = Path(__file__).parents[1] / "prepare.py"
ROUNDS = 25


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"that count, one before them does not ({ROUNDS})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write it to this file, with machine and versions")
    settings = parser.parse_args()
    corpus = python_sources()
    paragraphs = list(filter(str.strip, corpus.split("\n\n")))
    with tempfile.TemporaryDirectory() as folder:
        text, lines = Path(folder) / "corpus.txt", Path(folder) / "corpus.jsonl"
        text.write_text(corpus)
        lines.write_text("".join(json.dumps({"text": paragraph}) + "\n" for paragraph in paragraphs))
        inputs = [("one text", text, 1), ("lines of JSON", lines, len(paragraphs))]
        rows = [{"name": name, "documents": count} | rates(path, settings.rounds) for name, path, count in inputs]
    report = {"inputs": rows, "megabytes": len(corpus.encode()) / 1e6, "rounds": settings.rounds}
    print(json.dumps(report))
    if settings.json:
        report |= {"machine": machine(), "versions": versions("numpy", "tiktoken")}
        write_json(settings.json, report)


def rates(path: Path, count: int) -> dict:
    """MB/s of both, and how many times as fast prepare.py is: the median of the rounds' own ratios."""
    megabytes = sum(len(text.encode()) for text in texts_of(path)) / 1e6
    rounds = [measure(path, number) for number in range(count + 1)][1:]
    ours, plain = (statistics.median(seconds) for seconds in zip(*rounds, strict=True))
    ratio = statistics.median(plain / ours for ours, plain in rounds)
    return {"prepare_mb_s": megabytes / ours, "loop_mb_s": megabytes / plain, "ratio": ratio}


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
    """The program in this process: the start of a process of its own would take longer than the work."""
    sys.argv = [str(PREPARE), str(path), "--out", str(out), "--tokenizer", "gpt2", "--processes", "1"]
    try:
        with redirect_stdout(StringIO()):
            runpy.run_path(str(PREPARE), run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise


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


if __name__ == "__main__":
    open_console()
    main()
