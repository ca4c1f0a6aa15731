"""Joint measurements of all ranks: compute rates at the same time, links, access to the run folder.

Every function is collective: all ranks make the same calls, even if a rank finds a problem.
"""

import os
from contextlib import ExitStack, suppress
from tempfile import NamedTemporaryFile

from dist.probe.links import probe_links
from dist.probe.ports import Ports
from dist.waiting import barrier
from dist.world import World, threads_per_rank
from gpt2.kernels.numpy.cores import Cores
from scripts.training.utilization import product_rates


def measure(world: World, place: str | None) -> dict:
    """Return this rank's facts by section. place: the existing folder that will hold run folders, or None."""
    threads = threads_per_rank(world)
    barrier(world.comm)
    speed = product_rates(Cores(1)).max()  # one thread per rank, all ranks at the same time
    ports = Ports()
    before = ports.sent()
    links = probe_links(world)
    return {
        "threads": threads,
        "speed": float(speed),
        "link": next((link for link in links if link["node"] == world.node), None),
        "traffic": {name: count - before[name] for name, count in ports.sent().items()},
        "sees run folder": _sees(world, place),
    }


def _sees(world: World, place: str | None) -> bool | None:
    """Return whether this rank sees a file that rank 0 writes to `place`; None if rank 0 cannot write it."""
    with ExitStack() as stack:  # removes the file
        name = None
        if world.rank == 0 and place:
            with suppress(OSError):  # the section "run folder" reports it
                name = stack.enter_context(NamedTemporaryFile(dir=place, prefix=".doctor-")).name
        name = world.comm.bcast(name)
        seen = os.path.exists(name) if name else None
        barrier(world.comm)
    return seen
