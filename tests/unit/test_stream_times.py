"""stream_times.py: phases of a GPU that lags behind its host, against what the simulated GPU did, and when."""

import random

import numpy as np
import pytest

from tests.support.fake_stream import FakeDevice, ProfiledDevice
from tests.support.make_run import IDENTITY
from traces import Tracer
from traces.read import analysis
from traces.read.runs import Run
from traces.read.trace_files import read_trace
from traces.record import files, recorder, stream_times
from traces.record.phases import COMPUTE, EXCHANGE, NAMES, STEP
from traces.record.stream_times import EVENTS, GPU_PHASES

NEAR_NS = 20_000  # a few calls of the device, and its clock's error


@pytest.fixture
def new_tracer(monkeypatch, tmp_path):
    """Return a function that makes a tracer on a device's clock."""

    def make(device, **options):
        for module in (recorder, stream_times):
            monkeypatch.setattr(module, "perf_counter_ns", device.now)
        return Tracer(tmp_path, IDENTITY, device=device, **options)

    return make


@pytest.fixture
def spans_of(tmp_path):
    """Return a function that closes a tracer and returns [(name, start, end) in ns] of its file."""

    def read(tracer):
        tracer.close()
        records = read_trace(files.trace_path(tmp_path, 0)).records
        return [(NAMES[phase], int(start), int(end)) for _, phase, _, start, end, _ in records.tolist()]

    return read


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


def test_phases_last_as_long_as_the_gpu_takes(new_tracer, spans_of):
    """Though the host has queued all of them after a tenth of a millisecond, and waits once."""
    device = FakeDevice()
    tracer = new_tracer(device)
    with tracer.step(1):
        waits = device.waits
        for name, ms in (("forward", 10), ("backward", 20), ("update", 5)):
            with tracer.phase(name, bytes=3):
                device.queue(ms)
                device.run(0.01)
        assert device.waits == waits
        assert device.free_ns - device.host_ns > 34e6
    assert device.waits == waits + 1
    assert tracer.seconds(*COMPUTE) == pytest.approx(0.035, abs=1e-4)
    spans = spans_of(tracer)
    assert ms_of(spans) == near(("forward", 10), ("backward", 20), ("update", 5), ("step", 35))
    assert_in_order(spans)


def test_a_phase_of_the_host_begins_when_the_gpu_is_done_with_the_one_before(new_tracer, spans_of):
    """Partly hidden behind it: the rest of it counts. Hidden altogether: nothing does. On an idle GPU: all of it."""
    device = FakeDevice()
    tracer = new_tracer(device)
    with tracer.step(1):
        with tracer.phase("data"):
            device.run(3)
        with tracer.phase("forward"):
            device.queue(10)
        with tracer.phase("data"):
            device.run(4)
        with tracer.phase("backward"):
            device.queue(10)
        with tracer.phase("allreduce", bytes=8):
            device.synchronize()
            device.run(7)
        with tracer.phase("update"):
            device.queue(2)
        with tracer.phase("wait"):
            device.run(5)
    spans = spans_of(tracer)
    assert ms_of(spans) == near(
        ("data", 3), ("forward", 10), ("data", 0), ("backward", 10), ("allreduce", 7), ("update", 2), ("wait", 3),
        ("step", 35),
    )  # fmt: skip
    assert_in_order(spans)


def test_exchanges_on_the_stream_are_named_by_the_caller(new_tracer, spans_of):
    """NCCL's allreduce is queued: its time is the GPU's. The host's clock would give it a microsecond."""
    with pytest.raises(ValueError, match="'gather'"):
        new_tracer(FakeDevice(), on_stream=("gather",))
    device = FakeDevice()
    tracer = new_tracer(device, on_stream=(*GPU_PHASES, "allreduce"))
    with tracer.step(1):
        for name, ms in (("backward", 10), ("allreduce", 6), ("update", 3)):
            with tracer.phase(name):
                device.queue(ms)
        with tracer.phase("reduce"):
            device.synchronize()
            device.run(1)
    assert ms_of(spans_of(tracer)) == near(("backward", 10), ("allreduce", 6), ("update", 3), ("reduce", 1), (STEP, 20))


def test_seconds_in_a_step_wait_for_the_gpu(new_tracer):
    """As the training loop asks for them: with a phase of the host open, which then begins after the GPU's."""
    device = FakeDevice()
    tracer = new_tracer(device, on_stream=(*GPU_PHASES, "allreduce"))
    with tracer.step(1):
        with tracer.phase("forward"):
            device.queue(10)
        with tracer.phase("allreduce"):
            device.queue(4)
        with tracer.phase("wait"):
            assert tracer.seconds(*EXCHANGE) == pytest.approx(0.004, abs=2e-5)
            device.run(2)
        assert tracer.seconds("wait") == pytest.approx(0.002, abs=2e-5)
    device.waits = 0
    assert tracer.seconds("forward") == pytest.approx(0.01, abs=2e-5)
    assert device.waits == 0, "a step that has ended is settled"


@pytest.mark.parametrize("micro_steps", [1, EVENTS // 4, 200, 1000])
def test_events_go_round(new_tracer, spans_of, micro_steps):
    """More micro-steps than events: none is made, the host waits a few times at most, and every phase has its time."""
    device = FakeDevice()
    tracer = new_tracer(device)
    made = device.events
    with tracer.step(1):
        waits = device.waits
        for number in range(micro_steps):
            with tracer.phase("data"):
                device.run(0.001)
            with tracer.phase("forward"):
                device.queue(0.1 + number % 3)
            with tracer.phase("backward"):
                device.queue(1.0)
        # Four events a micro-step, and half of them come free at a time.
        assert device.waits - waits == max(0, -((EVENTS - 4 * micro_steps) // (EVENTS // 2 + 1)))
    assert device.events == made
    *phases, (_, start, end) = spans = spans_of(tracer)
    assert_in_order(spans)
    assert len(phases) == 3 * micro_steps
    forward = [ms for name, ms in ms_of(phases) if name == "forward"]
    np.testing.assert_allclose(forward, 0.1 + np.arange(micro_steps) % 3, atol=NEAR_NS / 1e6)
    assert sum(stop - begin for _, begin, stop in phases) == pytest.approx(end - start, rel=0.01, abs=NEAR_NS)


@pytest.mark.parametrize("rate", [1 - 5e-5, 1 + 5e-5])
def test_clocks_that_drift_apart(new_tracer, spans_of, rate):
    """50 ppm, over an hour of steps: no step's phases are off by more than that much of a step, nor overlap."""
    device = FakeDevice(rate)
    tracer = new_tracer(device)
    for number in range(1, 4):
        with tracer.step(number):
            with tracer.phase("forward"):
                device.queue(1000)
            queued_until = device.free_ns
            with tracer.phase("wait"):
                device.run(100)
            device.run(1000)
            update_from = device.host_ns
            with tracer.phase("update"):
                device.queue(1)
        device.run(1.2e6)
        assert tracer.seconds("forward") == pytest.approx(1, abs=6e-5 + NEAR_NS * 1e-9)
    spans = spans_of(tracer)
    assert spans[-4][2] == pytest.approx(queued_until, abs=5e-5 * 1e9 + NEAR_NS)
    assert update_from <= spans[-2][1] <= update_from + NEAR_NS + 1e5, "not before the host recorded it"
    for first in range(0, len(spans), 4):
        assert_in_order(spans[first : first + 4])


def test_phases_between_steps(new_tracer, spans_of, tmp_path):
    """Settled when the next step begins, or at the end, and with the number of the step before."""
    device = FakeDevice()
    tracer = new_tracer(device, steps="2:3")
    for number in range(1, 4):
        with tracer.step(number), tracer.phase("forward"):
            device.queue(5)
        with tracer.phase("eval"):
            device.queue(30)
            device.synchronize()
        assert tracer.seconds("eval") == 0
    assert ms_of(spans_of(tracer)) == near(*[("forward", 5), (STEP, 5), ("eval", 30)] * 2)
    assert read_trace(files.trace_path(tmp_path, 0)).records["step"].tolist() == [2, 2, 2, 3, 3, 3]


def random_step(tracer, device, choice):
    """Some phases of random length; returns the GPU's queued time by phase."""
    queued = dict.fromkeys(NAMES, 0.0)
    for _ in range(choice.randrange(60)):
        name = choice.choice((*GPU_PHASES[:-1], *EXCHANGE, "data", "wait"))
        with tracer.phase(name):
            device.run(choice.choice((0, 0.02, 1)))
            if name in (*GPU_PHASES, "allreduce"):
                ms = choice.choice((0.1, 2, 9))
                device.queue(ms)
                queued[name] += ms
            if choice.random() < 0.1:
                device.synchronize()
    return queued


def test_random_steps(new_tracer, spans_of, tmp_path):
    """Spans are in order; a step is its phases; the GPU's have what was queued in them, and the host's time at most."""
    choice, device = random.Random(4), FakeDevice(1 + 2e-5)
    tracer = new_tracer(device, on_stream=(*GPU_PHASES, "allreduce"))
    for number in range(1, 41):
        with tracer.step(number):
            queued = random_step(tracer, device, choice)
        for name in (*GPU_PHASES, "allreduce"):
            assert queued[name] - 0.1 <= 1e3 * tracer.seconds(name) <= queued[name] + 61
        total = tracer.seconds(*NAMES[:-1])
        assert total == pytest.approx(tracer.seconds(STEP), rel=0.01, abs=2e-4)
    spans = spans_of(tracer)
    ends = [index for index, (name, _, _) in enumerate(spans) if name == STEP]
    for before, last in zip([-1, *ends], ends, strict=False):
        assert_in_order(spans[before + 1 : last + 1])
    times = analysis.measure(Run(tmp_path, {}, [], [read_trace(files.trace_path(tmp_path, 0))]))
    np.testing.assert_allclose(times.seconds[:, 0, :-1].sum(1), times.step_seconds, rtol=0.01, atol=2e-4)


def test_a_phase_ends_when_the_gpu_says(new_tracer, spans_of, monkeypatch):
    """To the microsecond, though each call takes the host a tenth of a millisecond: the anchor lies in the middle of
    what recording it and waiting for it take."""
    monkeypatch.setattr("tests.support.fake_stream.CALL_NS", 100_000)
    device = FakeDevice()
    tracer = new_tracer(device)
    with tracer.step(1), tracer.phase("forward"):
        device.queue(10)
        ends = device.free_ns
    ((_, _, end), _) = spans_of(tracer)
    assert end == pytest.approx(ends, abs=2_000)


# --- what breaks into a phase: an exchange, an error of the host's, the GPU's own ---


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
