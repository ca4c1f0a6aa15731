"""Exchanges of ranges of vectors on GPUs, as strategies use them: what dist/host/exchange.py describes, by calls and
messages that are queued on a stream. So nobody on the host moves them on, or waits."""

from dist.gpu.buffers import device_zeros
from dist.host.exchange import FLOAT32
from dist.wire import WireFormat


class StreamExchange:
    """kind: what exchanges: DeviceCollectives, AllreduceCall, DeviceRing, DeviceTree or NodeExchange. Collective.

    With error feedback, what rounding takes from this rank's sums is kept in `errors` and added in the next exchange.
    One stream does one thing after the other, so one_at_a_time, which the host's want to know, changes nothing.
    """

    def __init__(self, kind, comm, ranges, wire_format: WireFormat = FLOAT32, one_at_a_time: bool = False):
        self._exchange, self.rounds = kind(comm, ranges, wire_format), wire_format.rounds
        self.engine = StreamEngine(comm.device, comm.stream)
        size = max(stop for _, stop in ranges)
        self.errors = device_zeros(comm.device, size) if wire_format.error_feedback else None

    def own_part(self, start: int, stop: int) -> tuple[int, int]:
        return self._exchange.own_part(start, stop)

    def start_allreduce(self, vector, start: int, stop: int) -> None:
        self.engine.start(self.allreduce(vector, start, stop))

    # Generators, as the host's are: nothing is queued before `progress` starts them. The host waits for nothing.

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
        """What an exchange that rounds is to have beside a range's gradients."""
        return [] if self.errors is None else [self.errors[start:stop]]


class StreamEngine:
    """Exchanges under way on a stream, in place of dist.progress_engine.ProgressEngine.

    device: has `stream`, on which it computes, and `cupy`. stream: of the exchanges, that one or one beside it. Then
    events keep the two in order: an exchange comes after all that was to be computed when it was begun, and what is to
    be computed after `finish` comes after it.
    """

    def __init__(self, device, stream):
        self._computes, self._stream = device.stream, stream
        self._new_event = lambda: device.cupy.cuda.Event(disable_timing=True)

    def start(self, exchange):
        """Queue all of an exchange, with what it computes itself. Returns its end, to be given to `finish`."""
        self._stream.wait_event(self._mark(self._computes))
        with self._stream:
            for _ in exchange:
                pass
        return self._mark(self._stream)

    def finish(self, end=None) -> None:
        """What is queued to be computed from here on comes after that exchange, or all."""
        self._computes.wait_event(end or self._mark(self._stream))

    def progress(self) -> bool:
        """Do nothing: the stream moves its calls on by itself."""
        return False

    def _mark(self, stream):
        event = self._new_event()
        event.record(stream)
        return event
