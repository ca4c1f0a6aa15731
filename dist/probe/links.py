"""Measure the latency and rates of the network between the nodes, and the offsets of the nodes' clocks.

The network (probe_links): each node's leader talks to its neighbours in a ring of leaders, all at the same time, for
one to three seconds (streams.py). A stream is as slow as the slower of two ports. So leaders measure both directions
around the ring, and a node keeps the better of its two rates: a slow port lowers the rate of its own node alone.
"""

import time

import numpy as np

from dist.mpi import MPI
from dist.probe.streams import LEAST_PIECE_BYTES, piece_bytes, stream
from dist.waiting import barrier
from dist.world import World

ROUND_TRIPS = 20
FIRST_S = (0.1, 0.2, 0.4, 0.8)  # lengths of the first streams, until their rates have settled
THEN_S = (0.15, 0.3)  # lengths of the later streams
LEAST_BUCKET_BYTES = 256 << 10
LEAST_SEGMENT_BYTES = 60_000  # below Open MPI's eager limit
MOST_SEGMENT_BYTES = 1 << 20
SEGMENT_S = 5e-4
CLOCK_ROUNDS = 50
ASK, ANSWER = range(1, 3)  # tags


def probe_links(world: World) -> list[dict]:
    """Return for each node {"node", "host", "latency_s", "out", "in", "both"} in bytes/s; [] on one node. Collective.

    latency_s: half a round trip to the next leader. out, in: while half of the nodes send; both: in each direction,
    while all send and receive at once. Rates are those that the links sustain, without bursts.
    """
    if world.node_count == 1:
        return []
    leaders = world.comm.Split(0 if world.local_rank == 0 else MPI.UNDEFINED, world.node)
    own = None
    if world.local_rank == 0:
        own = {"node": world.node, "host": world.host, **_probe(leaders)}
    barrier(world.comm)  # the other ranks sleep, and leave the cores to the leaders
    return [link for link in world.comm.allgather(own) if link is not None]


def bucket_bytes(links: list[dict]) -> int:
    """Return how many bytes to exchange at once so that one twentieth of the exchange is latency.

    A ring of M nodes has 2 (M-1) dependent messages: 20 * 2 (M-1) latency = 2 (M-1)/M bytes / rate, solved for bytes.
    """
    if not links:
        return LEAST_BUCKET_BYTES
    latency = max(link["latency_s"] for link in links)
    return max(LEAST_BUCKET_BYTES, int(20 * latency * rate_both_ways(links) * len(links)))


def rate_both_ways(links: list[dict]) -> float | None:
    """Return the bytes/s of the slowest node while it sends and receives at once; None on one node."""
    return min((link["both"] for link in links), default=None)


def segment_bytes(rate: float | None) -> int:
    """Return the bytes an exchange sends at once, over links of `rate` bytes/s, or in memory (None).

    A segment costs a message's software time, some 0.1 ms on a rank that slept. So its time on the link should be
    several times longer: SEGMENT_S. On slow links no message exceeds Open MPI's eager limit and waits for an answer.
    """
    if rate is None:
        return MOST_SEGMENT_BYTES
    return int(min(max(LEAST_SEGMENT_BYTES, rate * SEGMENT_S), MOST_SEGMENT_BYTES))


def _probe(leaders) -> dict[str, float]:
    latency = _latency(leaders)
    emptied, _ = _streams(leaders, 1, True, True, FIRST_S, LEAST_PIECE_BYTES)  # uses up the ports' burst allowance
    # Take the fastest rank's rate: a rank that sends to a slow port waits for answers through that port, and would
    # choose the smallest pieces. Then too few bytes would be under way while answers wait behind a neighbour's data.
    size = piece_bytes(leaders.allreduce(emptied.bytes_per_s, MPI.MAX))
    ways = [_rates(leaders, size, direction) for direction in ((1, -1) if leaders.size > 2 else (1,))]
    return {"latency_s": latency} | {name: max(rates[name] for rates in ways) for name in ways[0]}


def _rates(leaders, size: int, direction: int) -> dict[str, float]:
    """Return the rates to the neighbour in one direction, and from the neighbour in the other.

    For "out" and "in" the even leaders send first, then the odd ones. In a ring of odd length two neighbours are even:
    one of them sends and receives in the same turn.
    """
    odd = leaders.rank % 2
    sender_odd = (leaders.rank - direction) % leaders.size % 2
    both = _streams(leaders, direction, True, True, THEN_S, size)
    turns = [_streams(leaders, direction, odd == turn, sender_odd == turn, THEN_S, size) for turn in range(2)]
    rates = {"out": turns[odd][0].bytes_per_s, "in": turns[sender_odd][1].bytes_per_s}
    return rates | {"both": min(rate.bytes_per_s for rate in both)}


def _streams(leaders, direction: int, sends: bool, receives: bool, lengths_s: tuple[float, ...], size: int) -> tuple:
    """Return rates (out, in) to the leader `direction` further in the ring, and from the one behind.

    Streams get longer until all rates have settled. sends, receives: whether this leader does.
    """
    to = (leaders.rank + direction) % leaders.size
    source = (leaders.rank - direction) % leaders.size
    for seconds in lengths_s:
        rates = stream(leaders, to if sends else None, source if receives else None, seconds, size)
        if leaders.allreduce(all(rate.is_settled for rate in rates if rate), MPI.LAND):
            break
    return rates


def _latency(leaders) -> float:
    """Return half of the shortest round trip to the next leader, while this leader answers the previous one."""
    token = np.zeros(1)
    following = (leaders.rank + 1) % leaders.size
    previous = (leaders.rank - 1) % leaders.size
    best = float("inf")
    for _ in range(ROUND_TRIPS):
        barrier(leaders)
        start = time.perf_counter()
        asked = leaders.Irecv(token.copy(), previous, ASK)
        answer = leaders.Irecv(token.copy(), following, ANSWER)
        leaders.Isend(token, following, ASK).Wait()
        asked.Wait()
        leaders.Isend(token, previous, ANSWER).Wait()
        answer.Wait()
        best = min(best, time.perf_counter() - start)
    return best / 2


def clock_offset(world: World) -> dict[str, int]:
    """Compare this node's clock with rank 0's. Collective.

    {"offset_ns": what to add to this rank's time to get rank 0's, "error_ns": the most by which that can be wrong,
    "at_ns": when it was measured, in this rank's own time}. The node's leader asks rank 0 for its time repeatedly. The
    answer with the shortest round trip counts; half of this round trip bounds the error (Cristian 1989).
    """
    leaders = [place["rank"] for place in world.places if place["local_rank"] == 0 and place["rank"] != 0]
    answer = {"offset_ns": 0, "error_ns": 0, "at_ns": time.perf_counter_ns()}
    for leader in leaders:
        if world.rank == 0:
            for _ in range(CLOCK_ROUNDS):
                world.comm.recv(source=leader)
                world.comm.send(time.perf_counter_ns(), dest=leader)
        elif world.rank == leader:
            answer = _ask_time(world.comm)
        barrier(world.comm)  # ranks that wait for their turn leave the cores to these two
    return world.local_comm.bcast(answer)


def _ask_time(comm) -> dict[str, int]:
    answers = []
    for _ in range(CLOCK_ROUNDS):
        sent = time.perf_counter_ns()
        comm.send(None, dest=0)
        theirs = comm.recv(source=0)
        answers.append((time.perf_counter_ns() - sent, sent, theirs))
    round_trip, sent, theirs = min(answers)
    return {"offset_ns": theirs - (sent + round_trip // 2), "error_ns": round_trip // 2, "at_ns": sent}
