"""A run's tracer and watchdog, with what they want to know of the machine."""

from dist.clock import clock_offset
from dist.probe.ports import Ports
from dist.watch.watchdog import Watchdog
from gpt2.errors import UserError, file_errors
from traces import Tracer
from traces.record.counters import CounterFile
from traces.record.phases import EXCHANGE, PHASES
from traces.record.stream_times import GPU_PHASES


def new_watchdog(settings, world, folder) -> Watchdog | None:
    """Collective. folder: RUN/traces."""
    if not settings.stall_after or world.size == 1:
        return None
    meetings = (*EXCHANGE, "wait")
    return Watchdog(world, folder, PHASES, meetings, settings.stall_after, settings.end_on_stall)


def new_tracer(settings, world, folder, backend, watchdog) -> Tracer:
    """Collective. The first rank of a node also samples its ports."""
    identity = world.places[world.rank] | {"ranks": world.size, "strategy": settings.strategy}
    clock, counters = clock_offset(world), None
    with world.together(UserError), file_errors(folder, "choose another --out"):
        on_phase = watchdog and watchdog.on_phase
        if world.local_rank == 0 and world.node_count > 1 and settings.trace != "off":
            ports = Ports()
            counters = CounterFile(folder, identity, ports.names, clock, lambda: (*ports.read(), ports.stalls()))
        device = {} if settings.backend == "numpy" else _device(settings, backend)
        return Tracer(folder, identity, settings.trace, clock, counters, on_phase, **device)


def _device(settings, backend) -> dict:
    """What the tracer times phases on: with NCCL the exchange is queued on the stream too."""
    on_stream = (*GPU_PHASES, *EXCHANGE) if settings.transport == "nccl" else GPU_PHASES
    return {"device": backend.kernels.device, "on_stream": on_stream}
