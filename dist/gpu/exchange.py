"""Exchanges of ranges of vectors on GPUs, with the interface of dist/host/exchange.py. Calls and messages are queued on
a stream, so the host neither advances them nor waits."""

from dist.gpu.buffers import device_zeros
from dist.host.exchange import FLOAT32
from dist.wire import WireFormat


class StreamExchange:
    """Exchanges of one `kind`, a class such as DeviceRing, DeviceTree or NodeExchange, on a stream. Collective.

    With error feedback, `errors` keeps the rounding errors of this rank's sums, and the next exchange adds them. A
    stream runs one exchange after the other, so one_at_a_time, which host exchanges need, has no effect.
    """

    def __init__(self, kind, comm, ranges, wire_format: WireFormat = FLOAT32, one_at_a_time: bool = False):
        self._exchange = kind(comm, ranges, wire_format)
        self.is_lossy = wire_format.is_lossy
        self.engine = StreamEngine(comm.device, comm.stream)
        size = max(stop for _, stop in ranges)
        self.errors = device_zeros(comm.device, size) if wire_format.error_feedback else None

    def own_part(self, start: int, stop: int) -> tuple[int, int]:
        return self._exchange.own_part(start, stop)

    def start_allreduce(self, vector, start: int, stop: int) -> None:
        self.engine.start(self.allreduce(vector, start, stop))

    # Generators, as on the host: nothing is queued before `engine` starts them. The host waits for nothing.

    def allreduce(self, vector, start: int, stop: int):
        self._exchange.allreduce(vector[start:stop], *self._errors_of(start, stop))
        yield from ()

    def reduce_scatter(self, vector, start: int, stop: int):
        self._exchange.reduce_scatter(vector[start:stop], *self._errors_of(start, stop))
        yield from ()

    def all_gather(self, vector, start: int, stop: int):
        self._exchange.all_gather(vector[start:stop])
        yield from ()

    def _errors_of(self, start: int, stop: int) -> list:
        """Return the errors of a range, if an exchange takes them, as a list of arguments."""
        return [] if self.errors is None else [self.errors[start:stop]]


class StreamEngine:
    """Queues exchanges on a stream: dist.progress_engine.ProgressEngine for GPUs.

    device: has `stream`, on which it computes, and `cupy`. stream: for the exchanges, the same one or another. Events
    order two streams: an exchange runs after the compute queued before `start`, and compute queued after `finish` runs
    after the exchange.
    """

    def __init__(self, device, stream):
        self._computes = device.stream
        self._stream = stream
        self._new_event = lambda: device.cupy.cuda.Event(disable_timing=True)

    def start(self, exchange):
        """Queue an exchange with its own compute. Return its end, for `finish`."""
        self._stream.wait_event(self._mark(self._computes))
        with self._stream:
            for _ in exchange:
                pass
        return self._mark(self._stream)

    def finish(self, end=None) -> None:
        """Make compute that is queued from now on wait for the exchange that has this end, or for all."""
        self._computes.wait_event(end or self._mark(self._stream))

    def progress(self) -> bool:
        """Do nothing: the stream runs its calls by itself."""
        return False

    def _mark(self, stream):
        event = self._new_event()
        event.record(stream)
        return event
