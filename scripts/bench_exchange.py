"""How long one exchange of D bytes takes, by every strategy and by MPI's own collectives, against the network's bound.

mpirun -n 4 python scripts/bench_exchange.py --strategies all --bytes 8MB
srun -n 64 python scripts/bench_exchange.py --strategies all --bytes 8MB,500MB --link 100gbit --json exchange.json
sudo python scripts/virtual_cluster.py run --nodes 5 --ranks 9 --ranks-per-node 2 --rate 400mbit -- \\
    python scripts/bench_exchange.py --bytes 8MB --link 400mbit --figure exchange.png

The bound is 2 (M-1)/M D / B for M nodes and B bytes/s through a node's port each way. Contenders take turns, and every
rank checks every sum. A strategy's name may end in /bfloat16 (the wire), /own (the operation that MPI's collectives
add with) or /dedicated (the server); a collective's begins with MPI_. Bytes are those of each node's counters.
"""

import sys
from pathlib import Path

from dist.buffers import OwnBuffers
from dist.console import open_console
from dist.probe.links import probe_links, rate_both_ways, segment_bytes
from dist.probe.ports import Ports
from dist.wire import WireFormat
from dist.world import library_name, start_world
from gpt2.errors import UserError
from gpt2.files import place_of_file, replacing_in
from scripts.exchange_bench.contenders import chosen
from scripts.exchange_bench.progress import KeptReport, Progress
from scripts.exchange_bench.pytorch import Gloo, check_torch
from scripts.exchange_bench.rounds import measure, nothing
from scripts.exchange_bench.table import lower_bound_s, summarize, tables
from scripts.exchange_bench.values import FLOAT32, vector_size
from scripts.machine.host import machine, versions
from scripts.settings.training import OneLineParser
from scripts.settings.units import bytes_per_s, repetitions, sizes


def main():
    parser = exchange_parser(__doc__, repeat=5)
    parser.add_argument("--vs", choices=("torch",), help="also PyTorch's all-reduce on CPUs, gloo")
    parser.add_argument("--figure", type=Path, metavar="FILE.png", help="draw the contenders; as FILE.svg too")
    settings = parser.parse_args()
    world = start_world()
    with world.together(UserError):
        makers = check(settings, world)
    ports = Ports()
    report = describe(settings, world, ports)
    kept, progress = KeptReport(settings.json, report), Progress(settings.bytes, settings.repeat)
    for size_bytes in settings.bytes:
        progress.begin_size(makers)
        bench(world, makers, size_bytes, report, ports, progress, kept)
        world.print(f"{tables(report, report['sizes'][-1])}\n")
    with world.together(UserError):
        if world.rank == 0:
            kept.complete()
            draw(settings.figure, report)


def exchange_parser(description: str, repeat: int) -> OneLineParser:
    """The flags of a benchmark of exchanges. repeat: how many count by default."""
    parser = OneLineParser(description)
    add = parser.add_argument
    add("--strategies", default="all", metavar="all|LIST", help="by name, with commas (all)")
    add("--bytes", type=sizes, default="8MB", metavar="D[,D2]", help="of one gradient vector in float32 (8MB)")
    add("--link", type=bytes_per_s, metavar="RATE", help="a node's port, each way: 400mbit, 100gbit (probed)")
    counted = "counted exchanges of each (%(default)s), one before each that is not"
    add("--repeat", type=repetitions, default=repeat, metavar="R", help=counted)
    add("--json", type=Path, metavar="FILE", help="write everything measured to this file, as it comes")
    return parser


def check(settings, world) -> dict:
    """The contenders' makers by name. UserError for whatever does not fit together or cannot be written."""
    makers = chosen(settings.strategies, world.size)
    if settings.link and world.node_count == 1:
        raise UserError("--link with all ranks on one node, where nothing crosses a network: leave it out")
    if settings.vs == "torch":
        check_torch()
        makers["gloo"] = Gloo
    if settings.figure and settings.figure.suffix != ".png":
        raise UserError(f"--figure {settings.figure}: expected a name that ends in .png")
    if world.rank == 0:
        figures = [settings.figure, settings.figure.with_suffix(".svg")] if settings.figure else []
        for path in filter(None, [settings.json, *figures]):
            place_of_file(path)
    return makers


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


def bench(world, makers: dict, size_bytes: int, report: dict, ports: Ports, progress: Progress, kept: KeptReport):
    """Every contender at one size, rounded up so that each rank's shard is whole, into report["sizes"]. Collective.

    Rank 0 tells progress, and keeps the report, as results come.
    """
    size, rate = vector_size(size_bytes, world.size), report["link"]["bytes_per_s"]
    own_buffers, wire_format = OwnBuffers(world, size), WireFormat(segment_bytes=segment_bytes(rate))
    contenders = {name: make(world, own_buffers, wire_format) for name, make in makers.items()}
    bound_s, figures = lower_bound_s(FLOAT32 * size, world.node_count, rate), {}
    report["sizes"].append({"bytes": FLOAT32 * size, "bound_s": bound_s, "contenders": figures})

    def ends(name: str, repetitions: list[dict]) -> None:
        figures[name] = summarize(contenders[name], repetitions, FLOAT32 * size, world.size, bound_s)
        if world.rank == 0:
            progress.ends(name, repetitions)
            kept.keep()

    begins = progress.begins if world.rank == 0 else nothing
    measure(world, contenders, report["settings"]["repeat"], ports, begins, ends)
    for contender in contenders.values():
        contender.close()


def draw(path: Path | None, report: dict) -> None:
    """On rank 0: the figure, if one was asked for. UserError."""
    if path is None:
        return
    # Loading matplotlib takes a second, which --help and a mistake need not wait for.
    from traces.plots import exchange_bars, look

    with replacing_in(path.parent) as folder:
        look.save(exchange_bars.draw(report), folder / path.stem)


if __name__ == "__main__":
    open_console()
    main()
