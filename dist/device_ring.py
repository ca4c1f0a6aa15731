"""The ring between GPUs: what ring.py does in host memory, as messages and additions queued on one stream.

A step's message is a whole chunk, sent to the next rank while one comes from the rank before, and then added. To add a
piece while the next one comes would need a second stream; a GPU adds ten to a hundred times faster than a network
brings, so between nodes there is nothing to be won, and within one NCCL's own calls are the thing to use.
"""

import numpy as np

from dist import ring
from dist.device_buffers import array_dtype, device_zeros
from dist.device_comm import DeviceComm
from dist.exchanges import longest
from dist.ranges import cut
from dist.stream_progress import StreamProgress


class DeviceRing:
    """An exchange, see exchanges.py. wire: "float32", or "bfloat16", which is rounded as by wire.py: each partial sum
    when it is sent, each final value once, by its owner, who keeps what the others get. Sums are float32."""

    def __init__(self, comm: DeviceComm, ranges, wire: str, segment_bytes=None):
        self._comm, self.rounds = comm, wire != "float32"
        self.progress = StreamProgress(comm.device, comm.stream)
        most = longest(ranges) if comm.size > 1 else 0
        self._landing = device_zeros(comm.device, -(-most // comm.size))
        self._rounded = device_zeros(comm.device, most, array_dtype(wire)) if self.rounds else None

    def own_part(self, start: int, stop: int) -> tuple[int, int]:
        return ring.own_chunk(self._comm.size, self._comm.rank, start, stop)

    def allreduce(self, flat):
        yield from self.reduce_scatter(flat)
        yield from self.all_gather(flat)

    def reduce_scatter(self, flat):
        """Each chunk goes round from the rank after its owner to its owner."""
        for sent, received in self._steps(len(flat), self._comm.rank - 1):
            landing = self._landing[: received.stop - received.start]
            if self.rounds:
                self._rounded[sent] = flat[sent]
                self._pass_on(self._rounded[sent], self._rounded[received])
                landing[:] = self._rounded[received]
            else:
                self._pass_on(flat[sent], landing)
            total = flat[received]
            total += landing
        yield from ()  # nothing that the host would wait for

    def all_gather(self, flat):
        """Each chunk goes round from its owner to the rank before its owner."""
        vector = self._rounded[: len(flat)] if self.rounds else flat
        if self.rounds and self._comm.size > 1:
            own = slice(*self.own_part(0, len(flat)))
            vector[own] = flat[own]
        for sent, received in self._steps(len(flat), self._comm.rank):
            self._pass_on(vector[sent], vector[received])
        if self.rounds and self._comm.size > 1:
            flat[:] = vector
        yield from ()

    def _steps(self, length: int, first: int):
        """(what is sent, what is received) in each step, as slices; the chunk of rank `first` is sent in the first."""
        chunks, size = [slice(*chunk) for chunk in cut(length, self._comm.size)], self._comm.size
        return [(chunks[(first - step) % size], chunks[(first - step - 1) % size]) for step in range(size - 1)]

    def _pass_on(self, send, receive) -> None:
        if self.rounds:  # MPI has no bfloat16, and takes the bits for whole numbers
            send, receive = send.view(np.uint16), receive.view(np.uint16)
        after, before = (self._comm.rank + 1) % self._comm.size, (self._comm.rank - 1) % self._comm.size
        self._comm.Sendrecv(send, after, recvbuf=receive, source=before)
