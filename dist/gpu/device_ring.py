"""The ring of dist/host/host_ring.py between GPUs: messages and additions queued on one stream.

In each step a rank sends a whole chunk to the next rank, receives one from the rank before, and then adds it. Adding
during the transfer would need a second stream and gain little: a GPU adds ten to a hundred times faster than a network
transfers.
"""

from dist.gpu.buffers import device_zeros
from dist.gpu.comm import DeviceComm
from dist.gpu.wire import new_device_wire
from dist.ranges import cut, cut_range, longest
from dist.wire import WireFormat


class DeviceRing:
    """An exchange (exchange.py) with float32 sums. On a bfloat16 wire it rounds like the host's ring: each partial sum
    when it is sent, and each final value once, on its owner, which also keeps the rounded value."""

    def __init__(self, comm: DeviceComm, ranges, wire_format: WireFormat):
        self._comm = comm
        most = longest(ranges) if comm.size > 1 else 0
        chunk = -(-most // comm.size)
        self._wire = new_device_wire(comm.device, wire_format, most, chunk)
        self._landing = device_zeros(comm.device, chunk, self._wire.dtype)

    def own_part(self, start: int, stop: int) -> tuple[int, int]:
        return cut_range(start, stop, self._comm.size)[self._comm.rank]

    def allreduce(self, flat, errors=None) -> None:
        self.reduce_scatter(flat, errors)
        self.all_gather(flat, errors)

    def reduce_scatter(self, flat, errors=None) -> None:
        """Send each chunk around the ring, from the rank after its owner to its owner."""
        for sent, received in self._steps(len(flat), self._comm.rank - 1):
            landing = self._landing[: received.stop - received.start]
            self._pass_on(self._wire.packed(flat, sent, errors), landing)
            total = flat[received]
            total += self._wire.unpacked(landing)

    def all_gather(self, flat, errors=None) -> None:
        """Send each chunk around the ring, from its owner to the rank before its owner."""
        if self._comm.size > 1:
            self._wire.packed(flat, slice(*self.own_part(0, len(flat))), errors)
            for sent, received in self._steps(len(flat), self._comm.rank):
                self._pass_on(self._wire.gathered(flat, sent), self._wire.gathered(flat, received))
            self._wire.arrived(flat, slice(0, len(flat)))

    def _steps(self, length: int, first: int):
        """Return (slice sent, slice received) of each step; the first step sends the chunk of rank `first`."""
        size = self._comm.size
        chunks = [slice(*chunk) for chunk in cut(length, size)]
        return [(chunks[(first - step) % size], chunks[(first - step - 1) % size]) for step in range(size - 1)]

    def _pass_on(self, send, receive) -> None:
        after = (self._comm.rank + 1) % self._comm.size
        before = (self._comm.rank - 1) % self._comm.size
        self._comm.send_and_receive([(send, after)], [(receive, before)])
