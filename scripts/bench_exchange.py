"""How long one exchange of D bytes takes, by every strategy and by MPI's own collectives, against the network's bound.

mpirun -n 4 python scripts/bench_exchange.py --strategies all --bytes 8MB
srun -n 64 python scripts/bench_exchange.py --strategies all --bytes 8MB,500MB --link 100gbit --json exchange.json
sudo python scripts/virtual_cluster.py run --nodes 5 --ranks 9 --ranks-per-node 2 --rate 400mbit -- \\
    python scripts/bench_exchange.py --bytes 8MB --link 400mbit --figure exchange.png

The bound is 2 (M-1)/M D / B for M nodes and B bytes/s through a node's port each way. Contenders take turns, and every
rank checks every sum. A strategy's name may end in /bfloat16 (the wire) or /dedicated (the server); a collective's
begins with MPI_. Bytes are those of each node's interface counters.
"""
# ruff: noqa: E402

import argparse
import json
import re
import sys
from pathlib import Path

import mpi4py

mpi4py.rc(initialize=False, finalize=True)  # MPI starts in start_world: --help answers where it cannot start

from cluster_hosts import ClusterError
from cluster_network import bits_per_s
from exchange_contenders import chosen, makers
from exchange_rounds import measure
from exchange_table import lower_bound_s, summarize, tables
from exchange_torch import Gloo, check_torch
from machine import machine, versions
from train_settings import OneLineParser

from dist.buffers import OwnBuffers
from dist.links import probe_links, rate_both_ways, segment_bytes
from dist.ports import Ports
from dist.world import library_name, start_world
from gpt2.errors import UserError

UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "KI": 2**10, "MI": 2**20, "GI": 2**30}
SHARD_MULTIPLE = 16  # elements, as in training: a rank's shard begins on a cache line
FLOAT32 = 4


def main():
    settings = parse()
    world = start_world()
    with world.together(UserError):
        names = check(settings, world)
    ports = Ports()
    report = describe(settings, world, ports)
    for size_bytes in settings.bytes:
        report["sizes"].append(bench(world, names, size_bytes, settings.repeat, report["link"], ports))
        world.print(f"{tables(report, report['sizes'][-1])}\n")
    if world.rank == 0:
        write(settings, report)


def parse():
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--strategies", default="all", metavar="all|LIST", help="contenders by name, with commas (all)")
    add("--bytes", type=sizes, default="8MB", metavar="D[,D2]", help="of one gradient vector in float32 (8MB)")
    add("--link", type=link_rate, metavar="RATE", help="a node's port, each way: 400mbit, 100gbit (probed)")
    add(
        "--repeat",
        type=repetitions,
        default=5,
        metavar="R",
        help="counted exchanges of each (5), one before each that is not",
    )
    add("--vs", choices=("torch",), help="also PyTorch's all-reduce on CPUs, gloo")
    add("--json", type=Path, metavar="FILE", help="write everything measured to this file")
    add("--figure", type=Path, metavar="FILE.png", help="draw the contenders; as FILE.svg too")
    return parser.parse_args()


def sizes(text: str) -> list[int]:
    """[8000000, 64000000] for "8MB,64MB"."""
    found = [re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?I?)B?", word, re.IGNORECASE) for word in text.split(",")]
    if not all(found) or not all(match[2].upper() in UNITS and float(match[1]) > 0 for match in found):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of sizes: expected 8MB, or 8MB,64MiB, or 8000000")
    return [int(float(match[1]) * UNITS[match[2].upper()]) for match in found]


def link_rate(text: str) -> float:
    """50e6, bytes/s, for "400mbit"."""
    try:
        return bits_per_s(text) / 8
    except ClusterError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def repetitions(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} rounds, expected 1 or more")
    return int(text)


def check(settings, world) -> list[str]:
    """The contenders' names. UserError for whatever does not fit together or cannot be written."""
    names = chosen(settings.strategies, world.size)
    if settings.link and world.node_count == 1:
        raise UserError("--link with all ranks on one node, where nothing crosses a network: leave it out")
    if settings.vs == "torch":
        check_torch()
        names.append("gloo")
    if settings.figure and settings.figure.suffix != ".png":
        raise UserError(f"--figure {settings.figure}: expected a name that ends in .png")
    if world.rank == 0:
        for flag, path in (("--json", settings.json), ("--figure", settings.figure)):
            if path:
                check_writable(flag, path)
    return names


def check_writable(flag: str, path: Path) -> None:
    is_new = not path.exists()
    try:
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise UserError(f"{flag} {path}: {error.strerror}: give a file in a folder that exists") from None


def describe(settings, world, ports: Ports) -> dict:
    """What was measured, where, and with what; "sizes" still empty. Collective."""
    probed = [] if settings.link else probe_links(world)
    rate = settings.link or rate_both_ways(probed)
    interfaces = dict(world.comm.allgather((world.node, ports.names)))
    packages = ["numpy", "mpi4py", *(["torch"] if settings.vs else [])]
    return {
        "command": sys.argv,
        "settings": {"strategies": settings.strategies, "bytes": settings.bytes, "repeat": settings.repeat},
        "ranks": world.size,
        "nodes": world.node_count,
        "places": world.places,
        "link": {"bytes_per_s": rate, "nominal": settings.link is not None, "probed": probed},
        "interfaces": [interfaces[node] for node in range(world.node_count)],
        "machine": machine(),
        "versions": versions(*packages),
        "mpi_library": library_name(),
        "sizes": [],
    }


def bench(world, names: list[str], size_bytes: int, repeat: int, link: dict, ports: Ports) -> dict:
    """Every contender at one size, rounded up so that each rank's shard is whole. Collective."""
    multiple = SHARD_MULTIPLE * world.size
    size = -(-size_bytes // (FLOAT32 * multiple)) * multiple
    own_buffers, make = OwnBuffers(world, size), makers(segment_bytes(link["bytes_per_s"])) | {"gloo": Gloo}
    contenders = {name: make[name](world, own_buffers) for name in names}
    results = measure(world, contenders, repeat, ports)
    bound_s = lower_bound_s(FLOAT32 * size, world.node_count, link["bytes_per_s"])
    figures = {
        name: summarize(contender, results[name], FLOAT32 * size, world.size, bound_s)
        for name, contender in contenders.items()
    }
    for contender in contenders.values():
        contender.close()
    return {"bytes": FLOAT32 * size, "bound_s": bound_s, "contenders": figures}


def write(settings, report: dict) -> None:
    """On rank 0: the files that were asked for."""
    if settings.json:
        settings.json.write_text(json.dumps(report, indent=1) + "\n")
    if settings.figure:
        # Loading matplotlib takes a second, which --help and a mistake need not wait for.
        from traces import exchange_bars, look

        look.save(exchange_bars.draw(report), settings.figure.with_suffix(""))


if __name__ == "__main__":
    main()
