"""Measure exchanges in turns: seconds, CPU seconds, bytes through each node's ports; check the sums.

Before each exchange that counts, the same contender makes one that does not. In training, too, an exchange follows its
like: TCP keeps the congestion windows of the last exchange, and many senders into one port leave small windows. Between
exchanges the ranks sleep in a barrier, because a rank that spins slows down those that still work.
"""

import time
from collections.abc import Callable

import numpy as np

from dist.probe.ports import Ports
from dist.waiting import barrier, gather_everywhere
from dist.world import World, end_with_one_line
from scripts.bench.turns import in_turns, spread


def ignore(*unused) -> None:
    """Ignore a turn's begin or end."""


def measure(
    world: World,
    contenders: dict,
    repeat: int,
    ports: Ports,
    begins: Callable = ignore,
    ends: Callable = ignore,
) -> dict[str, list[dict]]:
    """Return {name: its `repeat` repetitions}, the same on every rank. Collective.

    Wrong sums end the job with one line.
    begins(turn, name) is called before each turn, ends(name, the contender's repetitions so far) after it.
    """
    results = {name: [] for name in contenders}
    for turn, name, contender in in_turns(contenders, repeat):
        begins(turn, name)
        checked_repetition(world, turn, name, contender, ports)  # does not count
        results[name].append(checked_repetition(world, turn, name, contender, ports))
        ends(name, results[name])
    return results


def measured_seconds(world: World, contenders: dict, repeat: int) -> dict[str, float]:
    """Return the median seconds of each contender, the same on every rank. Collective."""
    results = measure(world, contenders, repeat, Ports())
    return {name: spread([one["seconds"] for one in results[name]])["median"] for name in contenders}


def checked_repetition(world: World, turn: int, name: str, contender, ports: Ports) -> dict:
    """Measure one exchange; end the job if a rank has wrong sums. Collective."""
    result = repetition(world, contender, ports)
    if wrong := result.pop("wrong_ranks"):
        ranks = f"rank{'s' * (len(wrong) > 1)} {', '.join(map(str, wrong))} of {world.size}"
        end_with_one_line(world.comm, f"{name}, round {turn}: wrong sums on {ranks}")
    return result


def repetition(world: World, contender, ports: Ports) -> dict:
    """Measure one exchange. Collective.

    Returns seconds: of the slowest rank, from the barrier before the exchange to its end; cpu_s: the sum over all
    ranks; node_bytes: [bytes in, bytes out] of each node's ports; wrong_ranks: ranks that do not hold the sums.

    The barrier after the exchange is not timed: with sleeping ranks on few cores it takes milliseconds, which no
    exchange needs. So the seconds are at least those from the last rank's start to the last rank's end.
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
    barrier(world.comm)  # everything that was sent has arrived
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
