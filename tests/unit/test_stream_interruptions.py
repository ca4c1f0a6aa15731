"""stream_times.py: what breaks into a phase of a GPU: an exchange, an error of the host's, the GPU's own."""

from functools import partial

import pytest

from tests.support.fake_stream import FakeDevice, ProfiledDevice
from tests.support.traced_stream import assert_in_order, ms_of, near, spans_in, stream_tracer
from traces.record.phases import STEP
from traces.record.stream_times import GPU_PHASES


@pytest.fixture
def new_tracer(monkeypatch, tmp_path):
    return partial(stream_tracer, monkeypatch, tmp_path)


@pytest.fixture
def spans_of(tmp_path):
    return partial(spans_in, tmp_path)


def test_an_interruption_on_the_stream(new_tracer, spans_of):
    """What the phase does before it and after it are two spans of the GPU's; all of it is queued at once."""
    device = ProfiledDevice()
    tracer = new_tracer(device, on_stream=(*GPU_PHASES, "allgather"))
    with tracer.step(1), tracer.phase("backward"):
        for _ in range(2):
            device.queue(10)
            with tracer.interruption("allgather", bytes=8):
                device.queue(3)
            with tracer.interruption("wait"):
                device.run(0.1)
        device.queue(2)
    part = [("backward", 10), ("allgather", 3), ("backward", 0), ("wait", 0)]
    spans = spans_of(tracer)
    assert ms_of(spans) == near(*part, *part, ("backward", 2), (STEP, 28))
    assert_in_order(spans)
    names = ["backward", "allgather", "backward", "wait"] * 2
    assert device.opened == [(0, "step 1"), *((1, name) for name in [*names, "backward"])]
    assert device.depth == 0


class StuckError(Exception):
    """What CUDA would say."""


def failing_step(tracer, device, device_error):
    """Backward hangs or fails on the GPU, then the host fails on its own."""
    with tracer.step(1):
        with tracer.phase("forward"):
            device.queue(10)
        device.run(15)
        with tracer.phase("backward"):
            device.queue(50)
            device.run(5)
            device.error, device.waits = device_error, 0
            raise KeyError


@pytest.mark.parametrize("device_error", [None, StuckError()])
def test_an_error_in_a_phase_waits_for_nobody(new_tracer, spans_of, device_error):
    """It comes through, though the GPU hangs or fails; what the GPU has passed keeps its time; the tracer goes on."""
    device = ProfiledDevice()
    tracer = new_tracer(device)
    with pytest.raises(KeyError):
        failing_step(tracer, device, device_error)
    assert device.waits == device.depth == 0
    device.error = None
    with tracer.step(2), tracer.phase("forward"):
        device.queue(10)
    spans = spans_of(tracer)
    unknown, known = (("forward", 20), ("backward", 0)), (("forward", 10), ("backward", 5))
    assert ms_of(spans) == near(*(unknown if device_error else known), (STEP, 20), ("forward", 10), (STEP, 10))
    assert_in_order(spans[:3])


def test_the_gpus_own_error_ends_the_step(new_tracer):
    device = FakeDevice()
    tracer = new_tracer(device)
    with pytest.raises(StuckError), tracer.step(1), tracer.phase("forward"):
        device.error = StuckError()
    tracer.close()
