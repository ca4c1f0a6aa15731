"""Communicators for arrays on GPUs: what they have in common, and the one of a rank that is alone."""

from dist.mpi import MPI


class DeviceComm:
    """The ranks of `comm`, with the calls of mpi4py that strategies make, on arrays on this rank's GPU.

    And send_and_receive(sends, receives), of messages that are all under way at once: pairs of an array, of float32 or
    of bfloat16's bits as uint16, and a rank. What one rank sends another meets its receives in the order of the lists;
    arrays without elements are passed over.

    device: that GPU. stream: what the calls are in order with; device.stream, or one beside it for what is exchanged
    while the device computes. local_comm: those of the ranks that share a node; only for split_by_node. item_bytes: of
    one element of a collective, which sends float32.
    """

    item_bytes = 4

    def __init__(self, comm, device, stream, local_comm=None):
        self._comm, self._local_comm = comm, local_comm
        self.device, self.stream = device, stream
        self.rank, self.size = comm.rank, comm.size

    def allreduce(self, number, op=None):
        """Of Python numbers, by MPI."""
        return self._comm.allreduce(number, op or MPI.SUM)

    def Iallgather(self, send, receive):
        """Of arrays in host memory, by MPI."""
        return self._comm.Iallgather(send, receive)

    def Split(self, color: int, key: int):
        """The ranks of a color, on the same stream; None for a rank that gives MPI.UNDEFINED. Collective."""
        part = self._comm.Split(color, key)
        return None if part == MPI.COMM_NULL else self._alike(part)

    def split_by_node(self):
        """The ranks of this rank's node, on the same stream. Collective."""
        return self._alike(self._local_comm)

    def _alike(self, comm):
        return type(self)(comm, self.device, self.stream)


class AloneComm(DeviceComm):
    """One rank, and arrays of any kind: nobody is there to exchange with, and every sum is this rank's own vector."""

    def Allreduce(self, send, receive, op=None, root=0) -> None:
        if send is not MPI.IN_PLACE and receive is not None:
            receive[:] = send

    Reduce = Reduce_scatter_block = Allgather = Allreduce

    def Reduce_scatter(self, send, receive, counts) -> None:
        self.Allreduce(send, receive)

    def Allgatherv(self, send, receive) -> None:
        """receive: [array, counts], as in mpi4py."""
        self.Allreduce(send, receive[0])

    def Bcast(self, buffer, root: int) -> None:
        """The only rank has it."""

    def allreduce(self, number, op=None):
        return number
