"""Joint measurements of all ranks: compute rates at the same time, clocks, links, access to the run folder.

Every function is collective: all ranks make the same calls, whatever a rank finds.
"""

import os
import time
import uuid
from contextlib import suppress
from pathlib import Path

from dist.probe.links import clock_offset, probe_links
from dist.probe.ports import Ports
from dist.waiting import barrier
from dist.world import World, threads_per_rank
from gpt2.kernels.numpy.cores import Cores
from scripts.training.utilization import product_rates


def measure(world: World, place: str | None) -> dict:
    """Return this rank's facts by section. place: the folder for run folders, None if there is none."""
    threads = threads_per_rank(world)
    barrier(world.comm)
    speed = product_rates(Cores(1)).max()  # of one thread, while the other ranks compute as well
    clock = _clock(world)
    ports = Ports()
    before = ports.sent()
    links = probe_links(world)
    return {
        "threads": threads,
        "speed": float(speed),
        "clock": clock,
        "link": next((link for link in links if link["node"] == world.node), None),
        "traffic": {name: count - before[name] for name, count in ports.sent().items()},
        "sees run folder": _sees(world, place),
    }


def _clock(world: World) -> dict:
    """Return error_s, the uncertainty of this node's clock against rank 0's, and ahead_s, how far its time is ahead."""
    offset = clock_offset(world)
    # The time of day at which rank 0's perf_counter was 0.
    zero_ns = time.time_ns() - time.perf_counter_ns() - offset["offset_ns"]
    return {"error_s": offset["error_ns"] / 1e9, "ahead_s": (zero_ns - world.comm.bcast(zero_ns)) / 1e9}


def _sees(world: World, place: str | None) -> bool | None:
    """Return whether this rank sees a file that rank 0 writes to `place`; None if rank 0 cannot write it."""
    written = None
    if world.rank == 0 and place:
        with suppress(OSError):  # the section "run folder" reports it
            name = f".doctor-{uuid.uuid4().hex}"
            Path(place, name).touch()
            written = name
    written = world.comm.bcast(written)
    seen = bool(place) and os.path.exists(Path(place, written)) if written else None
    barrier(world.comm)
    if world.rank == 0 and written:
        with suppress(OSError):
            Path(place, written).unlink()
    return seen
