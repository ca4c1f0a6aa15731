"""A strategy's job in host memory, for tests that make one without training's help."""

from functools import partial

from dist.wire import WireFormat
from strategies import STRATEGIES, Job, Strategy


def host_job(kind: type[Strategy], wire="float32", error_feedback=False, segment_bytes=100, **parts) -> Job:
    """Job(**parts) with the strategy's exchange, in small segments."""
    exchange = partial(kind.host_exchange, wire_format=WireFormat(wire, segment_bytes, error_feedback))
    return Job(new_exchange=exchange, **parts)


def with_own_messages() -> list[str]:
    """The strategies whose messages are our own, which --wire and --overlap shape."""
    return [name for name, kind in STRATEGIES.items() if kind.overlaps]
