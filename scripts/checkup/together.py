"""What the ranks measure together: compute rates side by side, clocks, links, and whether all see the run folder.

Every function here is collective, with the same calls on every rank whatever a rank's own part meets.
"""

import os
import time
import uuid
from contextlib import suppress
from pathlib import Path

import numpy as np

from dist.probe.links import clock_offset, probe_links
from dist.probe.ports import Ports
from dist.waiting import barrier
from dist.world import World, threads_per_rank

PRODUCT_SIZE, PRODUCT_S = 512, 0.15


def measure(world: World, place: str | None) -> dict:
    """Sections of this rank's facts; place: the folder that run folders are made in, None if it has none."""
    threads = threads_per_rank(world)
    speed = _speed(world)
    clock = _clock(world)
    ports = Ports()
    before = ports.sent()
    links = probe_links(world)
    return {
        "threads": threads,
        "speed": speed,
        "clock": clock,
        "link": next((link for link in links if link["node"] == world.node), None),
        "traffic": {name: count - before[name] for name, count in ports.sent().items()},
        "sees run folder": _sees(world, place),
    }


def _speed(world: World) -> float:
    """FLOP/s of float32 matrix products on one thread, while every rank makes them.

    The best of many: what a core can do, also where another process takes it now and then.
    """
    left = np.random.default_rng(1).standard_normal((PRODUCT_SIZE, PRODUCT_SIZE), np.float32)
    out = left @ left
    barrier(world.comm)
    best, end = float("inf"), time.perf_counter() + PRODUCT_S
    while time.perf_counter() < end:
        start = time.perf_counter()
        np.matmul(left, left, out=out)
        best = min(best, time.perf_counter() - start)
    return 2 * PRODUCT_SIZE**3 / best


def _clock(world: World) -> dict:
    """error_s: how well this node's clock is known against rank 0's; ahead_s: the time of day's difference to its."""
    offset = clock_offset(world)
    # What the time of day is when perf_counter is 0: on rank 0's perf_counter the nodes' can be compared.
    zero_ns = time.time_ns() - time.perf_counter_ns() - offset["offset_ns"]
    return {"error_s": offset["error_ns"] / 1e9, "ahead_s": (zero_ns - world.comm.bcast(zero_ns)) / 1e9}


def _sees(world: World, place: str | None) -> bool | None:
    """Whether this rank sees a file that rank 0 writes in the place for run folders; None if that cannot write it."""
    written = None
    if world.rank == 0 and place:
        with suppress(OSError):  # the section about the run folder says so
            Path(place, name := f".doctor-{uuid.uuid4().hex}").touch()
            written = name
    written = world.comm.bcast(written)
    seen = bool(place) and os.path.exists(Path(place, written)) if written else None
    barrier(world.comm)
    if world.rank == 0 and written:
        with suppress(OSError):
            Path(place, written).unlink()
    return seen
