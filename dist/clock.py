"""Every node's clock against rank 0's, by the ping-pong with the shortest round trip.

time.perf_counter_ns counts from a moment of its own on each node, and is one clock for all ranks of a node. The node's
leader asks rank 0 for its time; half the shortest round trip bounds the error (Cristian 1989).
"""

import time

from dist.waiting import barrier
from dist.world import World

ROUNDS = 50


def clock_offset(world: World) -> dict[str, int]:
    """{"offset_ns": what to add to this rank's time to get rank 0's, "error_ns": its bound, "at_ns": when}. Collective.

    `at_ns` is in this rank's own time.
    """
    leaders = [place["rank"] for place in world.places if place["local_rank"] == 0 and place["rank"] != 0]
    answer = {"offset_ns": 0, "error_ns": 0, "at_ns": time.perf_counter_ns()}
    for leader in leaders:
        if world.rank == 0:
            _serve(world.comm, leader)
        elif world.rank == leader:
            answer = _ask(world.comm)
        barrier(world.comm)  # who waits for its turn leaves the cores to the two
    return world.local_comm.bcast(answer)


def _serve(comm, leader: int) -> None:
    for _ in range(ROUNDS):
        comm.recv(source=leader)
        comm.send(time.perf_counter_ns(), dest=leader)


def _ask(comm) -> dict[str, int]:
    best_round_trip, best_offset, sent_at = None, 0, 0
    for _ in range(ROUNDS):
        sent = time.perf_counter_ns()
        comm.send(None, dest=0)
        theirs = comm.recv(source=0)
        round_trip = time.perf_counter_ns() - sent
        if best_round_trip is None or round_trip < best_round_trip:
            best_round_trip, best_offset, sent_at = round_trip, theirs - (sent + round_trip // 2), sent
    return {"offset_ns": best_offset, "error_ns": best_round_trip // 2, "at_ns": sent_at}
