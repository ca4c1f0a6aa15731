"""The compiled loops of a user-defined operation (operation.py), and the C function around them that MPI calls."""

import numba
import numpy as np
from numba import types

_HANDLES = {4: types.uint32, 8: types.uint64}


def mpi_user_function(add, number, element: int, handle_bytes: int, world: int, size_of, extent_of, abort):
    """Compile MPI_User_function(invec, inoutvec, length, datatype): `add` for `length` elements of a datatype.

    number: numba's type of one number; element: the handle of its MPI type. MPI passes another type only if its caller
    used a derived type of such numbers. size_of, extent_of, abort: MPI's functions, by ctypes.
    """
    item = number.bitwidth // 8

    def function(invec, inoutvec, length, datatype):
        count = np.int64(length[0])
        if datatype[0] != element:
            size = np.zeros(1, np.int32)
            bounds = np.zeros(2, np.int64)
            size_of(datatype[0], size.ctypes.data)
            extent_of(datatype[0], bounds.ctypes.data, bounds[1:].ctypes.data)
            if bounds[1] != size[0]:
                abort(world, 1)
                while True:  # MPICH's abort returns before the job ends, and nobody may use a wrong sum
                    size_of(datatype[0], size.ctypes.data)
            count = count * size[0] // item
        add(numba.carray(invec, count), numba.carray(inoutvec, count))

    pointers = [types.CPointer(kind) for kind in (number, number, types.int32, _HANDLES[handle_bytes])]
    return numba.cfunc(types.void(*pointers))(function)


@numba.njit
def add_float32(added, total):
    for i in range(len(total)):
        total[i] += added[i]


@numba.njit
def add_bfloat16(added, total):
    for i in range(len(total)):
        total[i] = _rounded(_widened(added[i]) + _widened(total[i]))


@numba.njit(inline="always")
def _widened(half):
    """Return the float32 number that has these bfloat16 bits."""
    return np.uint32(np.uint32(half) << 16).view(np.float32)


@numba.njit(inline="always")
def _rounded(value):
    """Return the bfloat16 bits of a float32 number: to nearest, ties to even.

    A NaN stays a NaN: one that comes from two bfloat16 numbers has an empty lower half.
    """
    bits = np.uint32(np.float32(value).view(np.uint32))
    nearest = np.uint32(bits + np.uint32(0x7FFF) + np.uint32(np.uint32(bits >> 16) & np.uint32(1)))
    return np.uint16(nearest >> 16)
