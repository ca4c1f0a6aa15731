"""The part of a report that describes the job and its machines."""

import sys

from dist.probe.links import probe_links, rate_both_ways
from dist.world import World, library_name
from scripts.machine.host import machine, versions


def describe_job(world: World, nominal_rate: float | None, *packages: str) -> dict:
    """Return command, ranks, nodes, links, machine and versions. Probe the links if no rate is given. Collective.

    nominal_rate: rate of a port in each direction, bytes/s. packages: recorded with their versions if installed.
    """
    probed = [] if nominal_rate else probe_links(world)
    rate = nominal_rate or rate_both_ways(probed)
    return {
        "command": sys.argv,
        "ranks": world.size,
        "nodes": world.node_count,
        "places": world.places,
        "link": {"bytes_per_s": rate, "nominal": nominal_rate is not None, "probed": probed},
        "machine": machine(),
        "versions": versions(*packages),
        "mpi_library": library_name(),
    }
