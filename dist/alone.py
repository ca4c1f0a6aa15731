"""The calls of an mpi4py communicator where nobody is there to exchange with, for arrays of any kind."""

from dist.gpu.comm import DeviceComm
from dist.mpi import MPI


class AloneComm(DeviceComm):
    """Every sum is this rank's own vector, every broadcast its own. rank, size: those of `comm`."""

    def Reduce(self, send, receive, root: int) -> None:
        _copy(send, receive)

    def Bcast(self, buffer, root: int) -> None:
        """It has it."""

    def Allreduce(self, send, receive) -> None:
        _copy(send, receive)

    def Reduce_scatter_block(self, send, receive) -> None:
        _copy(send, receive)

    def Reduce_scatter(self, send, receive, counts) -> None:
        _copy(send, receive)

    def Allgather(self, send, receive) -> None:
        _copy(send, receive)

    def Allgatherv(self, send, receive) -> None:
        _copy(send, receive[0])

    def allreduce(self, number, op=None):
        return number


def _copy(send, receive) -> None:
    if send is not MPI.IN_PLACE and receive is not None:
        receive[:] = send
