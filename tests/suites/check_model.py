"""What the cost model predicts of an exchange on these nodes, next to what it takes.

mpirun -n 16 python tests/suites/check_model.py --bytes 8MB,32MB --link 10gbit --latency 20us
sudo python scripts/virtual_cluster.py run --nodes 4 --ranks 8 --ranks-per-node 2 --rate 400mbit -- \\
    python tests/suites/check_model.py --bytes 8MB --link 400mbit --json model.json

Rates inside a node, and of adding, are probed first; without --link and --latency the network's too. Then every
strategy that exchanges whole vectors does so in turns, as in bench_exchange.py.
"""

import json
import statistics
import time

import numpy as np

from dist.buffers import OwnBuffers
from dist.cost.memory import VECTOR_BYTES
from dist.cost.messages import Setting
from dist.cost.model import Cluster, Prediction, lower_bound_s, predict
from dist.cost.mpi_choices import UnknownChoice, library_key
from dist.mpi import MPI
from dist.probe.links import probe_links, segment_bytes
from dist.probe.ports import Ports
from dist.wire import WIRE_BYTES, WireFormat
from dist.world import World, library_name, start_world
from gpt2.errors import UserError
from scripts.bench_exchange import exchange_parser
from scripts.exchange_bench.contenders import chosen_makers, makers
from scripts.exchange_bench.rounds import measure
from scripts.exchange_bench.values import vector_size
from scripts.machine.host import machine, versions
from scripts.settings.units import duration_s
from strategies import STRATEGIES

DEFAULT_LATENCY_S = 50e-6
LOCAL_BYTES, LOCAL_ROUNDS = 8 << 20, 5


def main():
    settings = parse()
    world = start_world()
    with world.together(UserError):
        if world.node_count == 1:
            raise UserError("all ranks on one node, where no port is in the way: start ranks on two nodes or more")
        names = checked_names(settings.strategies, world.size)
    cluster = probed_cluster(settings, world)
    report = {
        "mpi_library": library_name(), "machine": machine(), "versions": versions("numpy", "mpi4py"),
        "placement": [place["node"] for place in world.places], "sizes": [],
        "rates": {name: getattr(cluster, name) for name in ("local_rate", "local_reduce_rate", "add_rate")},
    }  # fmt: skip
    for size_bytes in settings.bytes:
        report["sizes"].append(compare(world, cluster, names, size_bytes, settings.repeat))
        world.print(f"{table(report['sizes'][-1])}\n")
    if world.rank == 0 and settings.json:
        settings.json.write_text(json.dumps(report, indent=1) + "\n")


def parse():
    parser = exchange_parser(__doc__, repeat=3)
    latency = "of a message between nodes (probed, or 50us with --link)"
    parser.add_argument("--latency", type=duration_s, metavar="TIME", help=latency)
    return parser.parse_args()


def checked_names(text: str, ranks: int) -> list[str]:
    """Of all contenders those that are strategies; "all" are those in float32 that add by MPI's sum."""
    known = [name for name in chosen_makers("all", ranks) if name.partition("/")[0] in STRATEGIES]
    names = [name for name in known if name in STRATEGIES] if text == "all" else text.split(",")
    for name in names:
        if name not in known:
            raise UserError(f"--strategies: {name!r} is not modelled: expected all, or some of {', '.join(known)}")
    return names


def probed_cluster(settings, world) -> Cluster:
    """Collective."""
    placement, local_rates = [place["node"] for place in world.places], probe_local_rates(world)
    if settings.link:
        latency_s = DEFAULT_LATENCY_S if settings.latency is None else settings.latency
        return Cluster(placement, settings.link, settings.link, latency_s, **local_rates)
    links = probe_links(world)
    rates = [[link[way] for link in links] for way in ("in", "out")]
    latency_s = max(link["latency_s"] for link in links) if settings.latency is None else settings.latency
    return Cluster(placement, *rates, latency_s, nominal=False, **local_rates)


def probe_local_rates(world: World) -> dict[str, float]:
    """Return {"local_rate", "local_reduce_rate", "add_rate"} of dist.cost.model.Cluster, in bytes/s. Collective.

    All ranks work at once: an addition takes long where ranks that wait in MPI share its core.
    """
    vector, other = np.ones(LOCAL_BYTES // 4, np.float32), np.ones(LOCAL_BYTES // 4, np.float32)
    works = {
        "local_rate": lambda: world.local_comm.Bcast(vector),
        "local_reduce_rate": lambda: world.local_comm.Reduce(vector, other),
        "add_rate": lambda: np.add(vector, other, out=vector),
    }
    seconds = {name: [] for name in works}
    for _ in range(LOCAL_ROUNDS + 1):
        for name, work in works.items():
            world.comm.Barrier()  # waiting ranks spin, as they do in an exchange
            start = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - start)
        vector.fill(1.0)
    shares = world.comm.allreduce(world.local_size, MPI.MAX) > 1
    own = [statistics.median(values[1:]) for values in seconds.values()]
    slowest = [world.comm.allreduce(value, MPI.MAX) for value in own]
    rates = {name: LOCAL_BYTES / value for name, value in zip(seconds, slowest, strict=True)}
    return rates if shares else {"add_rate": rates["add_rate"]}


def compare(world, cluster: Cluster, names: list[str], size_bytes: int, repeat: int) -> dict:
    """{"bytes", "strategies": {name: {"measured_s", "predicted_s", "deviation", ...}}}. Collective."""
    size = vector_size(size_bytes, world.size)
    rate = float(min(np.min(cluster.rate_in), np.min(cluster.rate_out)))
    own_buffers, make, wire_format = OwnBuffers(world, size), makers(), WireFormat(segment_bytes=segment_bytes(rate))
    contenders = {name: make[name](world, own_buffers, wire_format) for name in names}
    results = measure(world, contenders, repeat, Ports())
    for contender in contenders.values():
        contender.close()
    rows = {name: row(cluster, name, VECTOR_BYTES * size, results[name]) for name in names}
    return {"bytes": VECTOR_BYTES * size, "strategies": rows}


def row(cluster: Cluster, name: str, size_bytes: int, repetitions: list[dict]) -> dict:
    """node_bytes, predicted_bytes: [in, out] of each node. bytes_deviation: of any node's port in any direction, in
    vectors. What is predicted is None where the library's algorithm is not known."""
    seconds = [repetition["seconds"] for repetition in repetitions]
    counted = np.median([repetition["node_bytes"] for repetition in repetitions], axis=0)
    measured = {"measured_s": statistics.median(seconds), "least_s": min(seconds), "most_s": max(seconds)}
    measured |= {"node_bytes": counted.tolist(), "bound_s": lower_bound_s(cluster, size_bytes)}
    try:
        prediction = predicted(cluster, name, size_bytes)
    except UnknownChoice as unknown:
        nothing = dict.fromkeys(("predicted_s", "predicted_bytes", "deviation", "bytes_deviation"))
        return measured | nothing | {"unknown": str(unknown)}
    ways = zip(counted, prediction.bytes_in, prediction.bytes_out, strict=True)
    most = max(abs(ways[way] - model[way]) for ways, *model in ways for way in range(2))
    return measured | {
        "predicted_s": prediction.seconds,
        "predicted_bytes": np.stack([prediction.bytes_in, prediction.bytes_out], axis=1).tolist(),
        "deviation": prediction.seconds / measured["measured_s"] - 1,
        "bytes_deviation": float(most / size_bytes),
        "algorithms": prediction.algorithms,
    }


def predicted(cluster: Cluster, name: str, size_bytes: int) -> Prediction:
    """name: a contender's, NAME, NAME/own or NAME/bfloat16. UnknownChoice."""
    strategy, _, form = name.partition("/")
    item = WIRE_BYTES.get(form, VECTOR_BYTES)
    library = library_key(library_name())
    placement = np.asarray(cluster.placement)
    setting = Setting(placement, size_bytes // VECTOR_BYTES, item, library, own_operation=form == "own")
    return predict(STRATEGIES[strategy].traits.messages, cluster, setting)


def table(size: dict) -> str:
    lines = [f"{size['bytes'] / 1e6:.4g} MB{'':<15} {'measured, ms':>13} {'model':>9} {'off by':>8}  bytes off by"]
    for name, one in size["strategies"].items():
        if one["predicted_s"] is None:
            lines.append(f"{name:<21} {one['measured_s'] * 1e3:>13.0f} {'-':>9}           {one['unknown']}")
            continue
        algorithms = ", ".join(one["algorithms"])
        lines.append(
            f"{name:<21} {one['measured_s'] * 1e3:>13.0f} {one['predicted_s'] * 1e3:>9.0f} {one['deviation']:>+8.1%}"
            f"  {one['bytes_deviation']:.1%} of a vector  {algorithms}".rstrip()
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
