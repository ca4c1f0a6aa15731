"""Exchanges of ranges of vectors on GPUs, as strategies use them: what dist/host/exchange.py describes, by calls and
messages that are queued on a stream."""

from dist.gpu.buffers import device_zeros
from dist.host.exchange import FLOAT32
from dist.wire import WireFormat


class StreamExchange:
    """kind: what exchanges: DeviceCalls, AllreduceCall, DeviceRing, DeviceTree or NodeExchange. Collective.

    With error feedback, what rounding takes from this rank's sums is kept in `errors` and added in the next exchange.
    One stream does one thing after the other, so one_at_a_time, which the host's want to know, changes nothing.
    """

    def __init__(self, kind, comm, ranges, wire_format: WireFormat = FLOAT32, one_at_a_time: bool = False):
        self._exchange = kind(comm, ranges, wire_format)
        self.progress, self.rounds = self._exchange.progress, wire_format.rounds
        size = max(stop for _, stop in ranges)
        self.errors = device_zeros(comm.device, size) if wire_format.error_feedback else None

    def own_part(self, start: int, stop: int) -> tuple[int, int]:
        return self._exchange.own_part(start, stop)

    def start_allreduce(self, vector, start: int, stop: int) -> None:
        self.progress.start(self.allreduce(vector, start, stop))

    def allreduce(self, vector, start: int, stop: int):
        return self._exchange.allreduce(vector[start:stop], *self._errors_of(start, stop))

    def reduce_scatter(self, vector, start: int, stop: int):
        return self._exchange.reduce_scatter(vector[start:stop], *self._errors_of(start, stop))

    def all_gather(self, vector, start: int, stop: int):
        return self._exchange.all_gather(vector[start:stop])

    def _errors_of(self, start: int, stop: int) -> list:
        """What an exchange that rounds is to have beside a range's gradients."""
        return [] if self.errors is None else [self.errors[start:stop]]
