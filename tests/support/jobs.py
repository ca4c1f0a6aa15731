"""A strategy's job in host memory, for tests that make one without training's help."""

from functools import cache

from dist.host.operation import new_operation
from dist.mpi import MPI
from dist.wire import WireFormat
from strategies import STRATEGIES, Job
from strategies.compatibility import operation_of


def host_job(kind, world, wire="float32", error_feedback=False, segment_bytes=100, op=None, **parts) -> Job:
    """Job(**parts) with the strategy's exchange, in small segments."""
    wire_format = WireFormat(wire, segment_bytes, error_feedback, operation_of(wire, op))
    return Job(**kind.traits.in_host_memory(world, wire_format, kept_operation(wire_format)), **parts)


@cache  # freed by no test: MPI's end does it
def kept_operation(wire_format: WireFormat):
    """Ranks that are threads of this process need none, and MPI has not begun there."""
    return new_operation(wire_format).op if MPI.Is_initialized() else None


def with_own_messages() -> list[str]:
    """The strategies whose messages are our own, which --wire and --overlap shape."""
    return [name for name, kind in STRATEGIES.items() if kind.traits.overlaps]
