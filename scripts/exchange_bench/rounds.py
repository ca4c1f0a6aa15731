"""Contenders in turn, round after round: seconds, CPU seconds, bytes through every node's port, sums checked.

In turns, so that a drift of the machine meets all of them. Each counted repetition follows one of the same contender
that is not counted, as in training an exchange follows its like: TCP goes on with the congestion windows that the last
exchange left, and many senders into one port leave small ones. Between repetitions, and at both ends of one, ranks wait
asleep: a rank that spins would slow those that still work.
"""

import statistics
import time
from collections.abc import Callable

import numpy as np

from dist.probe.ports import Ports
from dist.waiting import barrier, gather_everywhere
from dist.world import World, end_with_one_line


def nothing(*unused) -> None:
    """Who has nothing to say of a contender's turns."""


def measure(
    world: World, contenders: dict, repeat: int, ports: Ports, begins: Callable = nothing, ends: Callable = nothing
) -> dict[str, list[dict]]:
    """{name: its `repeat` repetitions}, the same on every rank. Collective; wrong sums end the job with one line.

    begins: called with a contender's name and the number of the round; ends: with its name and its repetitions so far.
    """
    results = {name: [] for name in contenders}
    for round_number in range(repeat):
        for name, contender in contenders.items():
            begins(name, round_number)
            for counts in (False, True):
                result = repetition(world, contender, ports)
                if wrong := result.pop("wrong_ranks"):
                    ranks = f"rank{'s' * (len(wrong) > 1)} {', '.join(map(str, wrong))} of {world.size}"
                    end_with_one_line(world.comm, f"{name}, round {round_number}: wrong sums on {ranks}")
                if counts:
                    results[name].append(result)
            ends(name, results[name])
    return results


def measured_seconds(world: World, contenders: dict, repeat: int) -> dict[str, float]:
    """Median seconds of each; the same on every rank. Collective."""
    results = measure(world, contenders, repeat, Ports())
    return {name: statistics.median(each["seconds"] for each in results[name]) for name in contenders}


def repetition(world: World, contender, ports: Ports) -> dict:
    """seconds: of the slowest rank, from the barrier before to the exchange's end; cpu_s: of all ranks, added.

    node_bytes: [bytes in, bytes out] of each node's ports; wrong_ranks: those that do not hold the sums. The barrier
    after it is not in the time: with sleeping ranks on few cores it takes milliseconds, which no exchange needs. So the
    seconds are at least those from the last rank's start to the last one's end.
    """
    contender.prepare()
    barrier(world.comm)
    before = ports.read()
    barrier(world.comm)  # all ports are read
    start, cpu_start = time.perf_counter(), time.process_time()
    contender.exchange()
    seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
    barrier(world.comm)  # all that was sent has arrived
    through = np.subtract(ports.read(), before)
    contender.settle()
    barrier(world.comm)
    ranks = gather_everywhere(world.comm, seconds, cpu_s, *through, not contender.is_correct())
    leaders = [place["rank"] for place in world.places if place["local_rank"] == 0]
    return {
        "seconds": float(ranks[:, 0].max()),
        "cpu_s": float(ranks[:, 1].sum()),
        "node_bytes": ranks[leaders, 2:4].astype(int).tolist(),
        "wrong_ranks": np.flatnonzero(ranks[:, 4]).tolist(),
    }
