"""Measure exchanges in turn (seconds, CPU seconds, bytes through each node's ports) and check their sums.

Each counted exchange follows an uncounted exchange of the same contender, as in training: TCP keeps the congestion
windows of the previous exchange, and they are small if many ranks sent into one port. Between exchanges, ranks sleep in
a barrier, because a spinning rank slows down ranks that still work.
"""

import math
import statistics
import time

import numpy as np

from dist.probe.ports import Ports
from dist.waiting import barrier, gather_everywhere
from dist.world import World, end_with_one_line
from scripts.bench.turns import in_turns


def measure(world: World, contenders: dict, repeat: int, ports: Ports) -> dict[str, list[dict]]:
    """Return {name: [`repeat` repetitions]}, the same on every rank. Collective."""
    results = {name: [] for name in contenders}
    for turn, name, contender in in_turns(contenders, repeat):
        results[name].append(counted_repetition(world, turn, name, contender, ports))
    return results


def measured_seconds(world: World, contenders: dict, rounds: int, longest_s: float = math.inf) -> dict[str, float]:
    """Return the median seconds of each contender, the same on every rank. Collective.

    longest_s: after this time no further round begins.
    """
    ports = Ports()
    begun = time.monotonic()
    found = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, (result,) in measure(world, contenders, 1, ports).items():
            found[name].append(result["seconds"])
        if world.comm.bcast(time.monotonic() - begun) > longest_s:
            break
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def counted_repetition(world: World, turn: int, name: str, contender, ports: Ports) -> dict:
    """Measure two exchanges and return the second. Collective; wrong sums end the job with one line."""
    for _ in range(2):
        result = repetition(world, contender, ports)
        if wrong := result.pop("wrong_ranks"):
            ranks = f"rank{'s' * (len(wrong) > 1)} {', '.join(map(str, wrong))} of {world.size}"
            end_with_one_line(world.comm, f"{name}, round {turn}: wrong sums on {ranks}")
    return result


def repetition(world: World, contender, ports: Ports) -> dict:
    """Measure one exchange. Collective.

    Return seconds: of the slowest rank, from the barrier before the exchange to its end; cpu_s: the sum over all ranks;
    node_bytes: [bytes in, bytes out] of each node's ports; wrong_ranks: ranks that do not hold the sums.

    The barrier after the exchange is not timed: when sleeping ranks share few cores, it takes milliseconds that are no
    part of the exchange. The seconds are at least the time from the last rank's start to the last rank's end.
    """
    contender.prepare()
    barrier(world.comm)
    before = ports.read()
    barrier(world.comm)  # all ports are read
    start = time.perf_counter()
    cpu_start = time.process_time()
    contender.exchange()
    seconds = time.perf_counter() - start
    cpu_s = time.process_time() - cpu_start
    barrier(world.comm)  # all messages have arrived
    through = np.subtract(ports.read(), before)
    contender.finish()
    barrier(world.comm)
    ranks = gather_everywhere(world.comm, seconds, cpu_s, *through, not contender.is_correct())
    leaders = [place["rank"] for place in world.places if place["local_rank"] == 0]
    return {
        "seconds": float(ranks[:, 0].max()),
        "cpu_s": float(ranks[:, 1].sum()),
        "node_bytes": ranks[leaders, 2:4].astype(int).tolist(),
        "wrong_ranks": np.flatnonzero(ranks[:, 4]).tolist(),
    }
