"""A communicator of one rank, for arrays of any kind: also those that no MPI library takes."""

from dist.gpu.comm import DeviceComm
from dist.mpi import MPI


class AloneComm(DeviceComm):
    """The calls of mpi4py where nobody is there to exchange with: every sum is this rank's own vector."""

    def Allreduce(self, send, receive, counts=None, root=0) -> None:
        if send is not MPI.IN_PLACE and receive is not None:
            receive[:] = send

    Reduce = Reduce_scatter = Reduce_scatter_block = Allgather = Allreduce

    def Allgatherv(self, send, receive) -> None:
        """receive: [array, counts], as in mpi4py."""
        self.Allreduce(send, receive[0])

    def Bcast(self, buffer, root: int) -> None:
        """The only rank has it."""

    def allreduce(self, number, op=None):
        return number
