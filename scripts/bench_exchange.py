"""Time one exchange of D bytes, by every strategy and by MPI's own collectives, against the network's lower bound.

mpirun -n 4 python scripts/bench_exchange.py --strategies all --bytes 8MB
srun -n 64 python scripts/bench_exchange.py --strategies all --bytes 8MB,500MB --link 100gbit --json exchange.json
sudo python scripts/virtual_cluster.py run --nodes 5 --ranks 9 --ranks-per-node 2 --rate 400mbit -- \\
    python scripts/bench_exchange.py --bytes 8MB --link 400mbit --figure exchange.png

The bound is 2 (M-1)/M D / B for M nodes and B bytes/s through a node's port each way. Contenders take turns, and every
rank checks every sum. A strategy's name may end in /bfloat16 or /int8 (--wire), /own (--op) or /dedicated (--server);
the names of MPI's collectives begin with MPI_. Bytes are read from the counters of each node's ports.
"""

from pathlib import Path

from dist.buffers import OwnBuffers
from dist.console import open_console
from dist.cost.memory import VECTOR_BYTES
from dist.probe.links import segment_bytes
from dist.probe.ports import Ports
from dist.wire import WireFormat
from dist.world import start_world
from gpt2.errors import UserError
from gpt2.files import place_of_file, replacing_in
from scripts.bench.job import describe_job
from scripts.bench.report import ReportFile
from scripts.bench.turns import in_turns
from scripts.exchange_bench.contenders import chosen_makers
from scripts.exchange_bench.exchange_progress import ExchangeProgress
from scripts.exchange_bench.exchange_table import lower_bound_s, summarize, table
from scripts.exchange_bench.rounds import counted_repetition
from scripts.exchange_bench.values import vector_size
from scripts.settings.training import OneLineParser
from scripts.settings.units import bytes_per_s, repetitions, sizes


def main():
    parser = exchange_parser(__doc__, repeat=5)
    parser.add_argument("--figure", type=Path, metavar="FILE.png", help="draw the contenders, also as FILE.svg")
    settings = parser.parse_args()
    world = start_world()
    with world.together(UserError):
        makers = check(settings, world)
    ports = Ports()
    report = describe(settings, world, ports)
    file = ReportFile(settings.json)
    progress = ExchangeProgress(settings.bytes, [*makers], settings.repeat)
    for size_bytes in settings.bytes:
        bench(world, makers, size_bytes, report, ports, progress, file)
        world.print(f"{table(report, report['sizes'][-1])}\n")
    with world.together(UserError):
        if world.rank == 0:
            file.write(report | {"complete": True})
            draw(settings.figure, report)


def exchange_parser(description: str, repeat: int) -> OneLineParser:
    """Return the flags of a benchmark of exchanges. repeat: the default number of exchanges that count."""
    parser = OneLineParser(description)
    add = parser.add_argument
    add("--strategies", default="all", metavar="all|LIST", help="names of contenders, separated by commas (all)")
    add("--bytes", type=sizes, default="8MB", metavar="D[,D2]", help="bytes of one gradient vector in float32 (8MB)")
    add("--link", type=bytes_per_s, metavar="RATE", help="rate of a node's port, each way: 400mbit, 100gbit (probed)")
    counted = "measured exchanges of each contender; one warm-up precedes each (%(default)s)"
    add("--repeat", type=repetitions, default=repeat, metavar="R", help=counted)
    add("--json", type=Path, metavar="FILE", help="write all measurements to this file as they come")
    return parser


def check(settings, world) -> dict:
    """Return the contenders' makers by name. Raise UserError if settings conflict or a file cannot be written."""
    makers = chosen_makers(settings.strategies, world.size)
    if settings.link and world.node_count == 1:
        raise UserError("--link with all ranks on one node, where nothing crosses a network: leave it out")
    if settings.figure and settings.figure.suffix != ".png":
        raise UserError(f"--figure {settings.figure}: expected a name that ends in .png")
    if world.rank == 0:
        figures = [settings.figure, settings.figure.with_suffix(".svg")] if settings.figure else []
        for path in filter(None, [settings.json, *figures]):
            place_of_file(path)
    return makers


def describe(settings, world, ports: Ports) -> dict:
    """Return the report before the first measurement. Collective."""
    interfaces = dict(world.comm.allgather((world.node, ports.names)))
    return describe_job(world, settings.link, "numpy", "mpi4py") | {
        "settings": {"strategies": settings.strategies, "bytes": settings.bytes, "repeat": settings.repeat},
        "interfaces": [interfaces[node] for node in range(world.node_count)],
        "sizes": [],
    }


def bench(
    world, makers: dict, size_bytes: int, report: dict, ports: Ports, progress: ExchangeProgress, file: ReportFile
) -> None:
    """Measure every contender at one size, rounded up to whole shards, and add the figures to the report. Collective.

    Rank 0 prints progress and writes the report as results come.
    """
    size = vector_size(size_bytes, world.size)
    rate = report["link"]["bytes_per_s"]
    own_buffers = OwnBuffers(world, size)
    wire_format = WireFormat(segment_bytes=segment_bytes(rate))
    contenders = {name: make(world, own_buffers, wire_format) for name, make in makers.items()}
    bound_s = lower_bound_s(VECTOR_BYTES * size, world.node_count, rate)
    results = {name: [] for name in contenders}
    figures = {}
    report["sizes"].append({"bytes": VECTOR_BYTES * size, "bound_s": bound_s, "contenders": figures})
    for turn, name, contender in in_turns(contenders, report["settings"]["repeat"]):
        if world.rank == 0:
            progress.begin_turn(size_bytes, turn, name)
        results[name].append(counted_repetition(world, turn, name, contender, ports))
        figures[name] = summarize(contender, results[name], VECTOR_BYTES * size, world.size, bound_s)
        if world.rank == 0:
            progress.end_turn(size_bytes, name, results[name][-1]["seconds"])
            file.keep(report | {"complete": False})
    for contender in contenders.values():
        contender.close()


def draw(path: Path | None, report: dict) -> None:
    """Draw the figure, if one was asked for. For rank 0. Raise UserError if it cannot be written."""
    if path is None:
        return
    # Loading matplotlib takes a second, which --help and mistakes need not wait for.
    from traces.plots import exchange_bars, look

    with replacing_in(path.parent) as folder:
        look.save(exchange_bars.draw(report), folder / path.stem)


if __name__ == "__main__":
    open_console()
    main()
