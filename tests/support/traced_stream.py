"""A tracer on a fake device's clock, and its spans as tests compare them."""

import pytest

from tests.support.make_run import IDENTITY
from traces import Tracer
from traces.read.trace_files import read_trace
from traces.record import files, recorder, stream_times
from traces.record.phases import NAMES, STEP

NEAR_NS = 20_000  # a few calls of the device, and its clock's error


def stream_tracer(monkeypatch, folder, device, **options):
    """A tracer on the device's clock that writes to `folder`."""
    for module in (recorder, stream_times):
        monkeypatch.setattr(module, "perf_counter_ns", device.now)
    return Tracer(folder, IDENTITY, device=device, **options)


def spans_in(folder, tracer):
    """[(name, start, end) in ns] of its file, after it is closed."""
    tracer.close()
    records = read_trace(files.trace_path(folder, 0)).records
    return [(NAMES[phase], int(start), int(end)) for _, phase, _, start, end, _ in records.tolist()]


def ms_of(spans):
    return [(name, (end - start) / 1e6) for name, start, end in spans]


def near(*named):
    return [(name, pytest.approx(ms, abs=NEAR_NS / 1e6)) for name, ms in named]


def assert_in_order(spans):
    """Without overlap, within their step."""
    *phases, (name, step_start, step_end) = spans
    assert name == STEP
    edges = [step_start, *(edge for _, start, end in phases for edge in (start, end)), step_end]
    assert edges == sorted(edges)
