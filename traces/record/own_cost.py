"""The cost of tracing itself."""

import os
from time import perf_counter_ns

from traces.record.files import RECORD, RecordFile
from traces.record.recorder import Tracer

PROBES = 500  # spans to measure: they take a millisecond


def tracing_share(tracer: Tracer) -> float:
    """Return the fraction of the traced steps' time that writing spans and reading counters took."""
    if not tracer.traced_ns:
        return 0.0
    return (tracer.spans * span_ns() + tracer.counters_ns) / tracer.traced_ns


def span_ns() -> float:
    """Measure the nanoseconds of one phase, its writing included."""
    probe = Tracer()
    probe._trace = RecordFile(os.devnull, {}, RECORD)  # a folder may have no room
    probe._trace.begin()
    probe._files = [probe._trace]
    probe._may_write = True
    probe._writing = True
    start = perf_counter_ns()
    for _ in range(PROBES):
        with probe.phase("wait"):
            pass
    probe.close()
    return (perf_counter_ns() - start) / PROBES
