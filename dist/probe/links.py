"""What the network between the nodes does, measured: latency, and rates one way and both ways at once.

Each node's leader talks to its neighbours in a ring of leaders, all at the same time, as an exchange would: the time
does not grow with the nodes. It takes a fraction of a second, more on slow links. A transfer is as slow as the slower
of two ports. So the ring is gone round both ways, and a node's rate is that with the better neighbour: a slow port
shows at its own node alone, where there are three nodes or more.
"""

import time

import numpy as np

from dist.mpi import MPI
from dist.waiting import barrier, wait
from dist.world import World

ROUND_TRIPS = 20
FIRST_BYTES, LAST_BYTES = 256 << 10, 64 << 20
LEAST_SEGMENT_BYTES, MOST_SEGMENT_BYTES = 60_000, 1 << 20  # the least is below Open MPI's eager limit
SEGMENT_S = 5e-4
LONG_ENOUGH_S = 0.05  # a transfer that long has left the shapers' and sockets' buffers behind


def probe_links(world: World) -> list[dict]:
    """For each node: {"node", "host", "latency_s", "out", "in", "both"}, rates in bytes/s; [] on one node. Collective.

    latency_s: half a round trip to the next leader. out, in: with half of the nodes sending; both: sending and
    receiving at once.
    """
    if world.node_count == 1:
        return []
    leaders = world.comm.Split(0 if world.local_rank == 0 else MPI.UNDEFINED, world.node)
    own = None
    if world.local_rank == 0:
        own = {"node": world.node, "host": world.host, **_probe(leaders)}
        leaders.Free()
    return [link for link in world.comm.allgather(own) if link is not None]


def bucket_bytes(links: list[dict]) -> int:
    """How much to exchange at once so that latency is a small part: a ring of M nodes passes 2 (M-1) messages on.

    One twentieth of the exchange may be latency: 20 * 2 (M-1) latency = 2 (M-1)/M bytes / rate.
    """
    if not links:
        return FIRST_BYTES
    latency = max(link["latency_s"] for link in links)
    return max(FIRST_BYTES, int(20 * latency * rate_both_ways(links) * len(links)))


def rate_both_ways(links: list[dict]) -> float | None:
    """Bytes/s of the slowest node, sending and receiving at once; None on one node."""
    return min((link["both"] for link in links), default=None)


def segment_bytes(rate: float | None) -> int:
    """How much an exchange sends at once, over links of `rate` bytes/s, or in memory (None).

    A segment takes a message's software time, some 0.1 ms on a rank that slept, so it is worth a multiple of that on
    the link. Beyond the eager limit it is sent when the receiver says so, and over TCP that answer waits behind the
    data that goes the same way: on slow links, whose segments can be as small, that costs a part of the rate.
    """
    if rate is None:
        return MOST_SEGMENT_BYTES
    return int(min(max(LEAST_SEGMENT_BYTES, rate * SEGMENT_S), MOST_SEGMENT_BYTES))


def _probe(leaders) -> dict[str, float]:
    latency, size, slowest_s = _latency(leaders), FIRST_BYTES // 4, 0.0
    while slowest_s < LONG_ENOUGH_S and size < LAST_BYTES:
        size *= 4
        slowest_s = leaders.allreduce(size / _rate(leaders, size, 1, True, True), MPI.MAX)
    ways = [_rates(leaders, size, direction) for direction in ((1, -1) if leaders.size > 2 else (1,))]
    return {"latency_s": latency} | {name: max(rates[name] for rates in ways) for name in ways[0]}


def _rates(leaders, size: int, direction: int) -> dict[str, float]:
    """Rates to the neighbour in one direction and from that in the other; first the even leaders send, then the odd."""
    odd, sender_odd = leaders.rank % 2, (leaders.rank - direction) % leaders.size % 2
    both = _rate(leaders, size, direction, True, True)
    turns = [_rate(leaders, size, direction, odd == turn, sender_odd == turn) for turn in range(2)]
    return {"out": turns[odd], "in": turns[sender_odd], "both": both}


def _latency(leaders) -> float:
    """Half of the shortest round trip to the next leader, while it serves the one before it likewise."""
    token, following, previous = np.zeros(1), (leaders.rank + 1) % leaders.size, (leaders.rank - 1) % leaders.size
    best = float("inf")
    for _ in range(ROUND_TRIPS):
        barrier(leaders)
        start = time.perf_counter()
        asked = leaders.Irecv(token.copy(), previous, 1)
        answer = leaders.Irecv(token.copy(), following, 2)
        leaders.Isend(token, following, 1).Wait()
        asked.Wait()
        leaders.Isend(token, previous, 2).Wait()
        answer.Wait()
        best = min(best, time.perf_counter() - start)
    return best / 2


def _rate(leaders, size: int, direction: int, sends: bool, receives: bool) -> float:
    """Bytes per second of one message of `size` to the leader `direction` further and from the one before that way."""
    outgoing, incoming, token = np.ones(size, np.uint8), np.ones(size, np.uint8), np.zeros(1)
    to, source = (leaders.rank + direction) % leaders.size, (leaders.rank - direction) % leaders.size
    barrier(leaders)
    start = time.perf_counter()
    arrivals = [leaders.Irecv(incoming, source, 3)] if receives else []
    sent = [leaders.Isend(outgoing, to, 3), leaders.Irecv(token, to, 4)] if sends else []
    for request in arrivals:
        wait(request)
        sent.append(leaders.Isend(token.copy(), source, 4))
    # A message is sent when the receiver says so: a send that has ended may still lie in a socket.
    for request in sent:
        wait(request)
    return size / (time.perf_counter() - start)
