"""What tracing costs a run: spans counted, and what one takes measured on the spot."""

import tempfile
from time import perf_counter_ns

from traces.record.recorder import Tracer

PROBES = 500
IDENTITY = {"rank": 0, "ranks": 1, "node": 0, "host": "", "local_rank": 0}


def tracing_share(tracer: Tracer) -> float:
    """Of the time of the steps that were traced, the part that writing their spans and reading counters took."""
    if not tracer.traced_ns:
        return 0.0
    return (tracer.spans * span_ns() + tracer.counters_ns) / tracer.traced_ns


def span_ns() -> float:
    """Nanoseconds of one phase, its writing included."""
    with tempfile.TemporaryDirectory() as folder:
        probe = Tracer(folder, IDENTITY)
        start = perf_counter_ns()
        for _ in range(PROBES):
            with probe.phase("wait"):
                pass
        probe.close()
        return (perf_counter_ns() - start) / PROBES
