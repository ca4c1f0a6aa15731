"""GPU-aware MPI: detect an MPI library that takes arrays on the GPU like arrays in host memory, and call it.

A library without GPU support may read the address as host memory and crash. So nothing is tried before the library has
declared support; then a small sum is checked.
"""

import ctypes
import os
import re

import numpy as np

from dist.gpu.comm import DeviceComm
from dist.mpi import MPI

MPI_LIBRARY = re.compile(r"(/\S*/lib(?:mpi|mpich|mpi_abi|mpi_cray|mpi_nvidia|mpi_gnu)[^/\s]*\.so\S*)")
CUDA = 0  # MPIX_GPU_SUPPORT_CUDA, of mpi.h of MPICH 4 and newer
PROOF_ELEMENTS = 256


def says_gpu_aware() -> tuple[bool, str]:
    """Return (whether the MPI library says that it takes CUDA arrays, the source of the answer). After MPI_Init."""
    version = MPI.Get_library_version()
    if "CRAY" in version.upper():
        return _variable("MPICH_GPU_SUPPORT_ENABLED")
    if "Intel" in version:
        return _variable("I_MPI_OFFLOAD")
    for library in _mapped_libraries():
        if hasattr(library, "MPIX_Query_cuda_support"):
            return bool(library.MPIX_Query_cuda_support()), "MPIX_Query_cuda_support"
        if hasattr(library, "MPIX_GPU_query_support"):
            answer = ctypes.c_int(0)
            status = library.MPIX_GPU_query_support(CUDA, ctypes.byref(answer))
            return status == MPI.SUCCESS and bool(answer.value), "MPIX_GPU_query_support"
    return False, "the library has no function that would say it"


def is_proven(comm, device) -> bool:
    """Return whether an Allreduce of arrays on the ranks' GPUs is right on all ranks. Collective.

    Only for a library that says it is GPU-aware: training would make the same call a moment later.
    """
    own = device.empty((PROOF_ELEMENTS,), np.float32)
    own[:] = comm.rank + 1.0
    GpuAwareComm(comm, device, device.stream).Allreduce(MPI.IN_PLACE, own)
    expected = comm.size * (comm.size + 1) / 2
    return comm.allreduce(bool((device.download(own) == expected).all()), MPI.LAND)


def _after_the_stream(name: str):
    """Return a method that waits for the device's stream and then makes the communicator's call of that name."""

    def call(self, *arguments, **options) -> None:
        self.device.synchronize()
        getattr(self._comm, name)(*arguments, **options)

    return call


class GpuAwareComm(DeviceComm):
    """The communicator's calls on arrays on the GPU. Each first waits for all work on the device's stream."""

    Reduce = _after_the_stream("Reduce")
    Bcast = _after_the_stream("Bcast")
    Allreduce = _after_the_stream("Allreduce")
    Reduce_scatter_block = _after_the_stream("Reduce_scatter_block")
    Reduce_scatter = _after_the_stream("Reduce_scatter")
    Allgather = _after_the_stream("Allgather")
    Allgatherv = _after_the_stream("Allgatherv")

    def send_and_receive(self, sends, receives) -> None:
        self.device.synchronize()
        MPI.Request.Waitall(
            [
                call(array, peer)
                for call, messages in ((self._comm.Irecv, receives), (self._comm.Isend, sends))
                for array, peer in messages
                if array.size
            ]
        )


def _variable(name: str) -> tuple[bool, str]:
    return os.environ.get(name, "0") not in ("", "0"), f"the library's own setting {name}"


def _mapped_libraries() -> list[ctypes.CDLL]:
    """Return this process's MPI libraries; mpi4py may have loaded them with RTLD_LOCAL."""
    with open("/proc/self/maps") as maps:
        paths = sorted(set(MPI_LIBRARY.findall(maps.read())))
    return [ctypes.CDLL(path) for path in paths]
