"""Part of make_docs.py: what docs/choosing-a-strategy.md shows of docs/benchmarks.md, and what advise.py says."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

from scripts.makers.pages.page import ROOT, replace_block

PAGE, BENCHMARKS = "docs/choosing-a-strategy.md", "docs/benchmarks.md"
MEASURED = {
    "exchange": "MPICH", "exchange_64MB": "MPICH", "exchange_even": "MPICH", "exchange_openmpi": "Open MPI",
}  # fmt: skip
ADVISE = "python scripts/advise.py --nodes 16 --ranks-per-node 4 --link 25gbit --model gpt2-124M --compute-ms 300"
TITLE = re.compile(r"(?P<size>\d+ MB) of float32, (?P<ranks>\d+) ranks on (?P<nodes>\d+) nodes")
ROW = re.compile(r"(?P<name>[\w+/-]+) +(?:[\d.]+ +){3}(?P<bound>[\d.]+) ")
HALVES = ("MPI_Reduce", "MPI_Bcast")  # of an exchange


def choice(folder: Path, _) -> None:
    write_table()
    words = [sys.executable, *shlex.split(ADVISE)[1:]]
    output = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    replace_block(PAGE, "choice_advice", f"```\n$ {ADVISE}\n{output.rstrip()}\n```")


def write_table() -> None:
    replace_block(PAGE, "choice", table(measured((ROOT / BENCHMARKS).read_text())))


def measured(page: str) -> dict[str, dict[str, str]]:
    """Where an exchange was measured -> by contender, its time over the lower bound, as the page has it."""
    found = {}
    for name, library in MEASURED.items():
        block = page.split(f"<!-- begin generated: {name} -->")[1].split("<!-- end")[0]
        place = None
        for line in block.splitlines():
            if title := TITLE.match(line):
                place = f"{title['ranks']} ranks on {title['nodes']} hosts, {title['size']}, {library}"
            elif line.startswith("bytes in / out"):
                place = None
            elif place and (row := ROW.match(line)):
                found.setdefault(place, {}).setdefault(row["name"], row["bound"])
    return found


def table(found: dict[str, dict[str, str]]) -> str:
    """A line a contender, those first that are closest to the bound where all were measured."""
    first = next(iter(found.values()))
    names = sorted((name for name in first if name not in HALVES), key=lambda name: float(first[name]))
    lines = [f"| times the bound | {' | '.join(found)} |", f"|---|{'---|' * len(found)}"]
    for name in names:
        shown = f"`{name}`" if not name.startswith("MPI_") and name != "gloo" else name
        lines.append(f"| {shown} | {' | '.join(one.get(name, '-') for one in found.values())} |")
    return "\n".join(lines)
