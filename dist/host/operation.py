"""The reduction operation of MPI's collectives: MPI_SUM, or a user-defined one that also adds bfloat16.

The user-defined operation is a C function compiled by numba. MPI_Op_create takes its address, so no call waits for the
interpreter lock; a Python function given to mpi4py's Op.Create would wait for it. MPI 4.1, section 6.9.5.
"""

import ctypes
from functools import cache
from types import SimpleNamespace

from dist.mpi import MPI
from dist.wire import WireFormat

_C_HANDLE = {4: ctypes.c_uint32, 8: ctypes.c_uint64}  # MPICH's handles are numbers, Open MPI's are addresses


def new_operation(wire_format: WireFormat) -> "OwnSum | SimpleNamespace":
    """Return an object whose `op` adds vectors in that format; the caller closes it."""
    if wire_format.operation == "mpi":
        return SimpleNamespace(op=MPI.SUM, close=lambda: None)
    return OwnSum(wire_format.is_lossy)


class OwnSum:
    """Adds float32 arrays, or bfloat16's bits in uint16 arrays, in float32, and rounds each sum.

    MPI may also call it with derived types of contiguous elements. A type with gaps ends the job, because a user's
    function cannot report an error to the library.
    """

    def __init__(self, bfloat16: bool = False):
        from numba import types  # slow to import

        from dist.host import sums

        add = sums.add_bfloat16 if bfloat16 else sums.add_float32
        number = types.uint16 if bfloat16 else types.float32
        element = MPI.UINT16_T if bfloat16 else MPI.FLOAT
        self._function = sums.mpi_user_function(
            add, number, element.handle,
            handle_bytes=MPI._sizeof(MPI.Datatype), world=MPI.COMM_WORLD.handle,
            size_of=_mpi_function("MPI_Type_size", _handle(MPI.Datatype), ctypes.c_void_p),
            extent_of=_mpi_function("MPI_Type_get_extent", _handle(MPI.Datatype), ctypes.c_void_p, ctypes.c_void_p),
            abort=_mpi_function("MPI_Abort", _handle(MPI.Comm), ctypes.c_int),
        )  # fmt: skip
        create = _mpi_function("MPI_Op_create", ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
        handle = _handle(MPI.Op)()
        commutes = True
        status = create(self._function.address, commutes, ctypes.byref(handle))
        if status != MPI.SUCCESS:
            raise MPI.Exception(status)
        self.op = MPI.Op.fromhandle(handle.value)

    def close(self) -> None:
        self.op.Free()


def _handle(kind):
    """Return the C type of MPI's handles of this kind."""
    return _C_HANDLE[MPI._sizeof(kind)]


def _mpi_function(name: str, *arguments):
    function = _library()[name]  # a new object each time, so its types can be set
    function.argtypes = arguments
    function.restype = ctypes.c_int
    return function


@cache
def _library() -> ctypes.CDLL:
    """Load mpi4py's own module, through which the functions of its MPI library are found."""
    return ctypes.CDLL(MPI.__file__)
