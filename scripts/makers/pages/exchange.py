"""Parts of make_docs.py: one exchange by many ways, on virtual hosts whose ports are limited. As root."""

import json
import subprocess
import sys
from pathlib import Path

from scripts.makers.pages.choice import write_table
from scripts.makers.pages.page import FIGURES, ROOT, SCRIPTS, machine, on_hosts, replace_block

UNEVEN = "--nodes 5 --ranks 9 --ranks-per-node 2 --rate 400mbit"
EVEN = "--nodes 4 --ranks 8 --ranks-per-node 2 --rate 400mbit"
OWN = "hierarchical,hierarchical-sharded,hierarchical/bfloat16,hierarchical-sharded/bfloat16"
# What takes several times as long at 64 MB is left to 8 MB, but for what MPI's two usual ways take.
CHOSEN = f"{OWN},ring,reduce-scatter,MPI_Allreduce,MPI_Reduce+Bcast"
LINK = "--link 400mbit"


def exchange(folder: Path, _) -> None:
    tables = [bench(folder, UNEVEN, f"--bytes 8MB {LINK} --vs torch", FIGURES / "exchange.png")]
    (FIGURES / "exchange.svg").unlink()
    write("exchange", folder, tables)


def exchange_64MB(folder: Path, _) -> None:
    flags = f"--bytes 64MB {LINK} --strategies {CHOSEN} --vs torch --repeat 3"
    write("exchange_64MB", folder, [bench(folder, UNEVEN, flags)])


def exchange_even(folder: Path, _) -> None:
    flags = f"{LINK} --strategies {CHOSEN} --vs torch"
    small = bench(folder, EVEN, f"--bytes 8MB {flags}")
    write("exchange_even", folder, [small, bench(folder, EVEN, f"--bytes 64MB {flags} --repeat 3")])


def exchange_openmpi(folder: Path, _) -> None:
    both = f"--bytes 8MB,64MB {LINK} --strategies {OWN},ring"
    rest = f"--bytes 8MB {LINK} --strategies hierarchical-sharded,MPI_Allreduce,MPI_Reduce+Bcast --repeat 2"
    write("exchange_openmpi", folder, [bench(folder, UNEVEN, both), bench(folder, UNEVEN, rest)])


def bench(folder: Path, hosts: str, flags: str, figure: Path | None = None) -> str:
    """Run bench_exchange.py on virtual hosts: its command, its tables, and how far apart the ways are. The report stays
    in `folder`."""
    words = [*flags.split(), "--json", str(folder / "exchange.json"), *(["--figure", str(figure)] if figure else [])]
    command = on_hosts(hosts, [sys.executable, str(SCRIPTS / "bench_exchange.py"), *words])
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT).stdout
    print(output)
    tables = output.partition("\n\n")[2].strip()  # below the cluster's own
    report = json.loads((folder / "exchange.json").read_text())
    shown = f"sudo python scripts/virtual_cluster.py run {hosts} -- python scripts/bench_exchange.py {flags}"
    found = "\n\n".join(finding(size) for size in report["sizes"])
    return f"```\n{shown}\n```\n\n```\n{tables}\n```\n\n{found}"


def finding(size: dict) -> str:
    """How many times as long as our fastest float32 exchange the others take, and what part of it half the bytes."""
    contenders = {name: one for name, one in size["contenders"].items() if one["whole"]}
    own = {name: one for name, one in contenders.items() if one["family"] == "own"}
    name = min((name for name in own if own[name]["wire"] == "float32"), key=lambda name: median(own[name]))
    others = {other: one for other, one in contenders.items() if one["family"] in ("mpi", "torch")}
    times = [f"{size['bytes'] / 1e6:.3g} MB: {name} takes {own[name]['times_bound']:.3f} of the bound"]
    times += [f"{other} {median(one) / median(own[name]):.2f} times as long" for other, one in others.items()]
    half = contenders.get(f"{name}/bfloat16")
    times += [f"bfloat16 on the wire {median(half) / median(own[name]):.2f} of its time"] if half else []
    return f"{', '.join(times)}."


def median(contender: dict) -> float:
    return contender["seconds"]["median"]


def write(block: str, folder: Path, tables: list[str]) -> None:
    replace_block("docs/benchmarks.md", block, "\n\n".join([*tables, machine(folder / "exchange.json")]))
    write_table()
