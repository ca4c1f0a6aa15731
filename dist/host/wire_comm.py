"""MPI's collectives for float32 vectors that travel in the wire format, under the names that mpi4py gives them."""

import numpy as np

from dist.mpi import MPI
from dist.wire import WireFormat, round_to_bfloat16, widen


class WireComm:
    """A communicator whose collectives below add with `operation`, an MPI.Op, and send bfloat16 if the format says so.

    Vectors are float32 and contiguous; each call works in place. Bcast and Allgather also round the sender's values, so
    all ranks have the same bits. Other calls go to the communicator: --wire and --op do not apply to them.
    """

    def __init__(self, comm, wire_format: WireFormat, operation):
        self._comm = comm
        self._is_lossy = wire_format.is_lossy
        self._half = np.zeros(0, np.uint16)  # MPI has no bfloat16: the bits travel as whole numbers
        self.operation = operation
        self.item_bytes = wire_format.item_bytes

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def Reduce(self, send, receive, root: int) -> None:
        """Sum into the root's own vector, `receive`. send: MPI.IN_PLACE on the root, the vector on the others."""
        vector = receive if send is MPI.IN_PLACE else send
        wire = self._packed(vector)
        if send is MPI.IN_PLACE:
            self._comm.Reduce(MPI.IN_PLACE, wire, self.operation, root=root)
            self._unpack(wire, vector)
        else:
            self._comm.Reduce(wire, None, self.operation, root=root)

    def Allreduce(self, send, vector) -> None:
        """Sum into `vector` on all ranks. send: MPI.IN_PLACE."""
        wire = self._packed(vector)
        self._comm.Allreduce(send, wire, self.operation)
        self._unpack(wire, vector)

    def Reduce_scatter_block(self, send, block) -> None:
        """Sum `send`, and give each rank its block of the sum."""
        wire = self._packed(send, beside=len(block))
        received = self._half[len(send) : len(send) + len(block)] if self._is_lossy else block
        self._comm.Reduce_scatter_block(wire, received, self.operation)
        self._unpack(received, block)

    def Bcast(self, vector, root: int) -> None:
        wire = self._room(vector)
        if self._comm.rank == root:
            self._pack(vector, wire)
        self._comm.Bcast(wire, root=root)
        self._unpack(wire, vector)

    def Allgather(self, send, vector) -> None:
        """Gather the ranks' blocks of `vector`, which have equal sizes, in place. send: MPI.IN_PLACE."""
        wire = self._room(vector)
        block = len(vector) // self._comm.size
        own = slice(self._comm.rank * block, (self._comm.rank + 1) * block)
        self._pack(vector[own], wire[own])
        self._comm.Allgather(send, wire)
        self._unpack(wire, vector)

    def _packed(self, vector, beside: int = 0):
        wire = self._room(vector, beside)
        self._pack(vector, wire)
        return wire

    def _room(self, vector, beside: int = 0):
        """Return the buffer that a vector is sent from: its own memory, or a buffer for as many bfloat16 numbers."""
        if not self._is_lossy:
            return vector
        if len(self._half) < len(vector) + beside:
            self._half = np.zeros(len(vector) + beside, np.uint16)
        return self._half[: len(vector)]

    def _pack(self, vector, wire) -> None:
        if self._is_lossy:
            round_to_bfloat16(vector, wire)

    def _unpack(self, wire, vector) -> None:
        if self._is_lossy:
            widen(wire, vector)
