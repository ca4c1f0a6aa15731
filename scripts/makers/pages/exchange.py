"""Parts of make_docs.py: one exchange by many ways on virtual hosts, as root, and the table of them all."""

import re
import shutil
from pathlib import Path

from scripts.makers.pages.page import FIGURES, ROOT, Part, fenced, measured_on, on_hosts, read, shown

LIBRARIES = {
    "exchange": "MPICH", "exchange_64MB": "MPICH", "exchange_even": "MPICH", "exchange_openmpi": "Open MPI",
    "exchange_even_openmpi": "Open MPI",
}  # fmt: skip
BENCHMARKS = "docs/benchmarks.md"
TITLE = re.compile(r"(?P<size>\d+ MB) of float32, (?P<ranks>\d+) ranks on (?P<nodes>\d+) nodes")
ROW = re.compile(r"(?P<name>[\w+/-]+) +(?:[\d.]+ +){3}(?P<bound>[\d.]+) ")
HALVES = ("MPI_Reduce", "MPI_Bcast")  # of an exchange


def exchange(part: Part, folder: Path) -> str:
    """Each command of the part, its tables, and how far apart the ways are."""
    file, texts = folder / "exchange.json", []
    for flags in part.flags:
        drawn = ["--figure", folder / "exchange.png"] if part.name == "exchange" else []
        tables = on_hosts(part.hosts, "bench_exchange.py", *flags.split(), "--json", file, *drawn)
        command = f"sudo python scripts/virtual_cluster.py run {part.hosts} -- python scripts/bench_exchange.py {flags}"
        texts += [fenced(command), fenced(tables), *map(finding, read(file)["sizes"])]
    if drawn:
        shutil.copy(folder / "exchange.png", FIGURES / "exchange.png")
    return "\n\n".join([*texts, measured_on(file)])


def finding(size: dict) -> str:
    """How many times as long as our fastest float32 exchange the others take, and what part of it half the bytes."""
    contenders = {name: one for name, one in size["contenders"].items() if one["whole"]}
    seconds = {name: one["seconds"]["median"] for name, one in contenders.items()}
    own = [name for name, one in contenders.items() if one["family"] == "own" and one["wire"] == "float32"]
    name = min(own, key=seconds.get)
    parts = [f"{size['bytes'] / 1e6:.3g} MB: {name} takes {contenders[name]['times_bound']:.3f} of the bound"]
    for other, one in contenders.items():
        if one["family"] in ("mpi", "torch"):
            parts.append(f"{other} {seconds[other] / seconds[name]:.2f} times as long")
    if half := seconds.get(f"{name}/bfloat16"):
        parts.append(f"bfloat16 on the wire {half / seconds[name]:.2f} of its time")
    return f"{', '.join(parts)}."


def choice(part: Part, folder: Path) -> dict[str, str]:
    """What docs/choosing-a-strategy.md repeats of docs/benchmarks.md, and what advise.py says."""
    advice = {"choice_advice": fenced(shown(part.advise)), "choice_cut": fenced(shown(part.cut))}
    return {"choice": choice_table((ROOT / BENCHMARKS).read_text())} | advice


def choice_table(page: str) -> str:
    """A line for each contender; those come first that are closest to the bound where all were measured."""
    found = measured(page)
    first = next(iter(found.values()))
    lines = [f"| times the bound | {' | '.join(found)} |", f"|---|{'---|' * len(found)}"]
    for name in sorted(first.keys() - HALVES, key=lambda name: (float(first[name]), name)):
        shown_name = name if name.startswith("MPI_") or name == "gloo" else f"`{name}`"
        lines.append(f"| {shown_name} | {' | '.join(one.get(name, '-') for one in found.values())} |")
    return "\n".join(lines)


def measured(page: str) -> dict[str, dict[str, str]]:
    """Where an exchange was measured -> by contender, its time over the lower bound, as the page has it."""
    found = {}
    for block, library in LIBRARIES.items():
        place = None
        for line in page.split(f"<!-- begin generated: {block} -->")[1].split("<!-- end")[0].splitlines():
            if title := TITLE.match(line):
                place = f"{title['ranks']} ranks on {title['nodes']} hosts, {title['size']}, {library}"
            elif line.startswith("bytes in / out"):
                place = None
            elif place and (row := ROW.match(line)):
                found.setdefault(place, {}).setdefault(row["name"], row["bound"])
    return found
