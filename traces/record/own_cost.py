"""What tracing itself takes of the steps that it traces."""

import os
from time import perf_counter_ns

from traces.record.recorder import Tracer

PROBES = 500  # spans whose cost is measured: a millisecond of them


def tracing_share(tracer: Tracer) -> float:
    """The part of the traced steps' time that writing their spans and reading counters took."""
    if not tracer.traced_ns:
        return 0.0
    return (tracer.spans * span_ns() + tracer.counters_ns) / tracer.traced_ns


def span_ns() -> float:
    """Nanoseconds of one phase, its writing included: measured here and now."""
    probe = Tracer()
    probe._file = open(os.devnull, "wb", buffering=0)  # noqa: SIM115 (a folder may have no room; `close` closes it)
    probe._writing = True
    start = perf_counter_ns()
    for _ in range(PROBES):
        with probe.phase("wait"):
            pass
    probe.close()
    return (perf_counter_ns() - start) / PROBES
