"""Communicators for arrays on GPUs: their base class, and the class for a single rank."""

from dist.mpi import MPI


class DeviceComm:
    """The ranks of `comm`, with mpi4py's collectives for float32 arrays on this rank's GPU, `device`.

    send_and_receive(sends, receives) starts all its messages at once. A message is (array, rank), the array float32, or
    bfloat16's bits as uint16. Messages between two ranks match in the order of the lists; empty arrays are skipped.

    stream: where calls are queued: device.stream, or another stream to exchange while the device computes. local_comm:
    the ranks of the node, needed by split_by_node only.
    """

    item_bytes = 4  # of one element on the wire

    def __init__(self, comm, device, stream, local_comm=None):
        self._comm = comm
        self._local_comm = local_comm
        self.device = device
        self.stream = stream
        self.rank = comm.rank
        self.size = comm.size

    def allreduce(self, number, op=None):
        """Reduce a Python number, by MPI."""
        return self._comm.allreduce(number, op or MPI.SUM)

    def Iallgather(self, send, receive):
        """Gather arrays in host memory, by MPI."""
        return self._comm.Iallgather(send, receive)

    def Split(self, color: int, key: int):
        """Return the ranks of a color, on the same stream; None for MPI.UNDEFINED. Collective."""
        part = self._comm.Split(color, key)
        return None if part == MPI.COMM_NULL else self._alike(part)

    def split_by_node(self):
        """Return the ranks of this node, on the same stream. Collective."""
        return self._alike(self._local_comm)

    def _alike(self, comm):
        return type(self)(comm, self.device, self.stream)


class AloneComm(DeviceComm):
    """A single rank, with arrays of any kind: every sum is the rank's own vector."""

    def Allreduce(self, send, receive, op=None, root=0) -> None:
        if send is not MPI.IN_PLACE and receive is not None:
            receive[:] = send

    Reduce = Reduce_scatter_block = Allgather = Allreduce

    def Bcast(self, buffer, root: int) -> None:
        """Do nothing."""

    def allreduce(self, number, op=None):
        return number
