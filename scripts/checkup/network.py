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
from dist.probe.ports import INFINIBAND_UNIT, Ports
from dist.waiting import barrier
from dist.world import World, threads_per_rank

PRODUCT_SIZE, PRODUCT_S = 512, 0.15


def measure(world: World, place: str | None) -> dict:
    """Sections of this rank's facts; place: the folder that run folders are made in, None if it has none."""
    threads = threads_per_rank(world)
    speed = _product_rate(world.comm)
    clock = _clock(world)
    before = _traffic()
    links = probe_links(world)
    return {
        "threads": threads,
        "speed": speed,
        "clock": clock,
        "link": next((link for link in links if link["node"] == world.node), None),
        "traffic": {name: count - before.get(name, 0) for name, count in _traffic().items()},
        "sees run folder": _sees(world, place),
    }


def _product_rate(comm) -> float | None:
    """FLOP/s of float32 matrix products on one thread, the best of some, while every rank makes them."""
    try:
        left = np.random.default_rng(1).standard_normal((PRODUCT_SIZE, PRODUCT_SIZE), np.float32)
        out = left @ left
    except MemoryError:
        left = None
    barrier(comm)
    if left is None:
        return None
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


def _traffic() -> dict[str, int]:
    """Bytes that have left through each of this node's interfaces, by dist.probe.ports' names."""
    return {name: _sent(name) for name in Ports().names}


def _sent(name: str) -> int:
    device, _, port = name.partition(":")
    counter, unit = f"/sys/class/net/{name}/statistics/tx_bytes", 1
    if port:
        counter, unit = f"/sys/class/infiniband/{device}/ports/{port}/counters/port_xmit_data", INFINIBAND_UNIT
    try:
        return unit * int(Path(counter).read_text())
    except (OSError, ValueError):
        return 0


def _sees(world: World, place: str | None) -> bool | None:
    """Whether this rank sees a file that rank 0 writes in the place for run folders; None if that cannot write it."""
    name = world.comm.bcast(f".doctor-{uuid.uuid4().hex}")
    written = False
    if world.rank == 0 and place:
        with suppress(OSError):  # the section about the run folder says so
            (Path(place) / name).touch()
            written = True
    written = world.comm.bcast(written)
    seen = bool(place) and os.path.exists(Path(place) / name) if written else None
    barrier(world.comm)
    if world.rank == 0 and written:
        with suppress(OSError):
            os.unlink(Path(place) / name)
    return seen
