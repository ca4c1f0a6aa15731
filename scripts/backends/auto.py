"""--strategy auto: a short trial on these ranks picks the fastest exchange.

In host memory the cost model names the few that are tried. Between GPUs all that may be the fastest are tried: what the
links inside a node carry, and what NCCL makes of a call, the cost model does not know.
"""

from contextlib import suppress
from dataclasses import replace
from functools import partial

from dist.buffers import OwnBuffers
from dist.cost.model import Cluster, predict
from dist.cost.mpi_choices import UnknownChoice, library_key
from dist.gpu.buffers import device_zeros
from dist.wire import WireFormat
from dist.world import World, library_name
from scripts.backends.kinds import exchange_on_gpus, form_on_gpus
from scripts.exchange_bench.contenders import DeviceContender, StrategyContender
from scripts.exchange_bench.rounds import measured_seconds
from strategies import candidates

CANDIDATES, REPEAT = 3, 3
TRIAL_S = 0.3  # predicted, of one exchange of the trial
LEAST_TRIAL_BYTES, MOST_TRIAL_BYTES = 1 << 20, 64 << 20
LEAST_S = 1e-6  # of a prediction: on one node it is 0
ONE_NODE_RATE = 10e9  # no port is in the way, and the model needs a number


def choose_on_cores(world: World, settings, size: int, links: list[dict], wire_format: WireFormat) -> tuple[str, str]:
    """(name, why) for vectors of `size` elements over links as probe_links measured them. Collective."""
    kinds = {
        name: kind
        for name, kind in candidates(settings.strategy, "host").items()
        if settings.wire in kind.wires and (kind.overlaps or not settings.overlap)
    }
    predicted = predictions(world, kinds, size, links, wire_format)
    tried = sorted(predicted, key=predicted.get)[:CANDIDATES]
    longest_s = max([predicted[name] for name in tried] + [LEAST_S])
    tried += [name for name in kinds if kinds[name].messages is None]
    trial_bytes = min(max(LEAST_TRIAL_BYTES, int(TRIAL_S / longest_s * size * 4)), MOST_TRIAL_BYTES)
    trial_size = whole_shards(min(size, trial_bytes // 4), world.size)
    own_buffers = OwnBuffers(world, trial_size)
    contenders = {name: StrategyContender(world, own_buffers, wire_format, kinds[name]) for name in tried}
    seconds = measured_seconds(world, contenders, REPEAT)
    for contender in contenders.values():
        contender.close()
    best = min(seconds, key=seconds.get)
    said = {name: f"model: {predicted[name]:.3g} s" if name in predicted else "not modelled" for name in tried}
    results = ", ".join(f"{name} {seconds[name] * 1e3:.1f} ms ({said[name]})" for name in tried)
    rest = ", ".join(f"{name} {predicted[name]:.3g} s" for name in predicted if name not in tried)
    megabytes = trial_size * 4 / 1e6, size * 4 / 1e6
    why = f"of {megabytes[0]:.1f} MB in a trial: {results}; of {megabytes[1]:.0f} MB by the model alone: {rest}"
    return best, why


def predictions(world: World, kinds, size: int, links: list[dict], wire_format: WireFormat) -> dict[str, float]:
    """Seconds of one exchange by the cost model, of each of these strategies whose messages are known."""
    rates = {way: [link[way] for link in links] or ONE_NODE_RATE for way in ("in", "out")}
    latency_s = max([link["latency_s"] for link in links], default=0.0)
    placement = [place["node"] for place in world.places]
    cluster = Cluster(placement, rates["in"], rates["out"], latency_s, nominal=False)
    library = library_key(library_name())
    item, own, result = wire_format.item_bytes, wire_format.operation == "own", {}
    for name, kind in kinds.items():
        if kind.messages is not None:
            with suppress(UnknownChoice):
                predicted = predict(kind.messages, cluster, size * item, library, item, own_operation=own)
                result[name] = predicted.seconds
    return result


def choose_on_gpus(world: World, strategy: str, size: int, wire_format: WireFormat, comm) -> tuple[str, str]:
    """(name, why) for vectors of `size` elements, exchanged over comm. Collective."""
    trial_size = whole_shards(min(size, MOST_TRIAL_BYTES // 4), world.size)
    buffers = OwnBuffers(world, trial_size, zeros=partial(device_zeros, comm.device))
    without_feedback = replace(wire_format, error_feedback=False)
    has_nodes = 1 < world.node_count < world.size  # of several ranks, which some strategies are made for
    contenders = {
        name: DeviceContender(world, buffers, form_on_gpus(kind, False), comm, exchange_on_gpus(kind, without_feedback))
        for name, kind in candidates(strategy, "gpus").items()
        if wire_format.wire in kind.on_gpus.exchanges and (has_nodes or not kind.knows_nodes)
    }
    seconds = measured_seconds(world, contenders, REPEAT)
    tried = ", ".join(f"{name} {taken * 1e3:.1f} ms" for name, taken in seconds.items())
    why = f"of {trial_size * 4 / 1e6:.1f} MB in a trial between GPUs, which the cost model does not know: {tried}"
    return min(seconds, key=seconds.get), why


def whole_shards(size: int, ranks: int) -> int:
    """`size` rounded up so that each rank's shard is whole."""
    return -(-size // ranks) * ranks
