"""A GPU that lags behind its host, on a clock that tests set: what traces/record/stream_times.py wants of a device."""

import numpy as np

CALL_NS = 1_000  # of the host's time that each call of the device takes


class Event:
    """passes_ns: when the GPU comes by, on the host's clock; None before it is recorded."""

    def __init__(self, device):
        self.device, self.passes_ns = device, None

    def record(self, stream):
        assert stream is self.device.stream
        self.device.host_ns += CALL_NS
        self.passes_ns = max(self.device.host_ns, self.device.free_ns)

    def synchronize(self):
        self.device.wait_until(self.passes_ns)

    @property
    def done(self):
        if self.device.error:
            raise self.device.error
        return self.passes_ns <= self.device.host_ns


class FakeDevice:
    """queue(ms) queues work, run(ms) is work of the host. host_ns: its clock; free_ns: when the stream has run dry.

    rate: the GPU's milliseconds in one of the host's; CUDA tells them in float32. waits: how often the host has waited.
    error: what the GPU has run into, as CUDA says at whatever is asked from then on.
    """

    def __init__(self, rate=1.0):
        self.host_ns = self.free_ns = 10**12
        self.rate, self.waits, self.events, self.error, self.stream = rate, 0, 0, None, object()

    def now(self):
        return self.host_ns

    def run(self, ms):
        self.host_ns += round(ms * 1e6)

    def queue(self, ms):
        self.host_ns += CALL_NS
        self.free_ns = max(self.host_ns, self.free_ns) + round(ms * 1e6)

    def wait_until(self, ns):
        self.waits += 1
        if self.error:
            raise self.error
        self.host_ns = max(self.host_ns + CALL_NS, ns)

    def synchronize(self):
        self.wait_until(self.free_ns)

    def new_event(self):
        self.events += 1
        return Event(self)

    def elapsed_ms(self, start, stop):
        assert start.passes_ns <= stop.passes_ns <= self.host_ns, "CUDA refuses an event that has not passed"
        return float(np.float32((stop.passes_ns - start.passes_ns) * self.rate * 1e-6))


class ProfiledDevice(FakeDevice):
    """With ranges for a profiler. opened: (depth, name) of each, in order; depth: of those open."""

    def __init__(self):
        super().__init__()
        self.opened, self.depth = [], 0

    def range_push(self, name):
        self.opened.append((self.depth, name))
        self.depth += 1

    def range_pop(self):
        self.depth -= 1
