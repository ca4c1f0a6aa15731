"""What the communicators for arrays on GPUs have in common."""


class DeviceComm:
    """The ranks of `comm`, with the calls of mpi4py that strategies make, on arrays on this rank's GPU.

    device: that GPU. stream: what the calls are in order with; device.stream, or one beside it for what is exchanged
    while the device computes.
    """

    def __init__(self, comm, device, stream):
        self._comm, self._device, self.stream = comm, device, stream
        self.rank, self.size = comm.rank, comm.size

    def allreduce(self, number):
        """Of Python numbers, by MPI."""
        return self._comm.allreduce(number)

    def Iallgather(self, send, receive):
        """Of arrays in host memory, by MPI."""
        return self._comm.Iallgather(send, receive)
