"""--strategy auto: the cost model names the fastest exchanges of these nodes and links, a short trial picks one.

Between arrays on GPUs auto_on_gpus.py does it, without the model.
"""

from dataclasses import replace

from dist.buffers import OwnBuffers
from dist.cost.model import Cluster, predict
from dist.cost.mpi_choices import UnknownChoice, library_key
from dist.cost.schedules import WIRE_BYTES
from dist.probe.links import rate_both_ways, segment_bytes
from dist.world import World, library_name
from scripts.backends.auto_on_gpus import choose_on_gpus
from scripts.exchange_bench.contenders import StrategyContender
from scripts.exchange_bench.rounds import measured_seconds
from scripts.settings.training import AUTO
from strategies import STRATEGIES, Bucketed

CANDIDATES, REPEAT = 3, 3
TRIAL_S = 0.3  # predicted, of one exchange of the trial
LEAST_TRIAL_BYTES, MOST_TRIAL_BYTES = 1 << 20, 64 << 20
ONE_NODE_RATE = 10e9  # no port is in the way, and the model needs a number
# Those that change what a rank holds are chosen for memory, by name; none is no exchange.
BY_NAME_ONLY = ("none", "zero-2", "zero-3")


def with_strategy(settings, world: World, size: int, links: list[dict], comm=None):
    """The settings, with `auto` decided. comm: a DeviceComm where exchanges are between GPUs. Collective."""
    if settings.strategy != AUTO:
        return settings
    if comm is None:
        name, why = choose_strategy(world, settings, size, links)
    else:
        name, why = choose_on_gpus(world, settings, size, comm)
    world.print(f"--strategy auto takes {name}; {why}")
    return replace(settings, strategy=name)


def choose_strategy(world: World, settings, size: int, links: list[dict]) -> tuple[str, str]:
    """(name, why) for vectors of `size` elements over links as probe_links measured them. Collective."""
    predicted = predictions(world, settings, size, links)
    candidates = sorted(predicted, key=predicted.get)[:CANDIDATES]
    longest_s = max(1e-6, *(predicted[name] for name in candidates))
    trial_bytes = min(max(LEAST_TRIAL_BYTES, int(TRIAL_S / longest_s * size * 4)), MOST_TRIAL_BYTES)
    trial_size = min(size, trial_bytes // 4)
    trial_size = -(-trial_size // world.size) * world.size
    seconds = trial(world, candidates, settings, trial_size, links)
    best = min(seconds, key=seconds.get)
    tried = ", ".join(f"{name} {seconds[name] * 1e3:.1f} ms (model: {predicted[name]:.3g} s)" for name in candidates)
    rest = ", ".join(f"{name} {predicted[name]:.3g} s" for name in predicted if name not in candidates)
    why = f"of {trial_size * 4 / 1e6:.1f} MB in a trial: {tried}; of {size * 4 / 1e6:.0f} MB by the model alone: {rest}"
    return best, why


def predictions(world: World, settings, size: int, links: list[dict]) -> dict[str, float]:
    """Seconds of one exchange by the cost model, of each strategy that may run with these settings."""
    rates = {way: [link[way] for link in links] or ONE_NODE_RATE for way in ("in", "out")}
    latency_s = max([link["latency_s"] for link in links], default=0.0)
    placement = [place["node"] for place in world.places]
    cluster = Cluster(placement, rates["in"], rates["out"], latency_s, nominal=False)
    library = library_key(library_name())
    own_only = settings.overlap or settings.wire != "float32"
    result = {}
    for name, kind in STRATEGIES.items():
        if name in BY_NAME_ONLY or (own_only and not issubclass(kind, Bucketed)):
            continue
        try:
            result[name] = predict(name, cluster, size * WIRE_BYTES[settings.wire], library, settings.wire).seconds
        except UnknownChoice:
            continue
    return result


def trial(world: World, names: list[str], settings, size: int, links: list[dict]) -> dict[str, float]:
    """Median seconds of each, in turns; the same on every rank."""
    own_buffers = OwnBuffers(world, size)
    options = {"wire": settings.wire, "segment_bytes": segment_bytes(rate_both_ways(links))}
    contenders = {name: StrategyContender(world, own_buffers, name, **options) for name in names}
    seconds = measured_seconds(world, contenders, REPEAT)
    for contender in contenders.values():
        contender.close()
    return seconds
