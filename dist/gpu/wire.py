"""The wire format of a vector on a GPU: dist/wire.py, queued on a stream.

    packed(flat, part, errors)  the array to send for flat[part]: a partial sum, or a final value of this rank
    unpacked(received)          the float32 values of a partial sum; valid until the next call
    gathered(flat, part)        the buffer that receives final values of flat[part] and sends them on
    arrived(flat, part)         write the final values, packed or gathered, into flat

part is a slice. errors is None, or float32 and as long as flat: the rank that rounds keeps the rounding error there,
and adds it to the same element in the next exchange.
"""

import numpy as np

from dist.gpu.buffers import array_dtype, device_zeros
from dist.wire import WireFormat


class DeviceFloat32Wire:
    """Sends the vector's own memory, and receives final values straight into it."""

    dtype = np.dtype(np.float32)

    def packed(self, flat, part: slice, errors=None):
        return flat[part]

    def unpacked(self, received):
        return received

    def gathered(self, flat, part: slice):
        return flat[part]

    def arrived(self, flat, part: slice) -> None:
        """Do nothing: the values are in place."""


class DeviceBFloat16Wire:
    """bfloat16 on the wire, sums in float32. dtype: MPI has no bfloat16, so it sends the bits as whole numbers.

    size: elements of the longest vector. longest: elements of the longest partial sum that is received at once.
    """

    dtype = np.dtype(np.uint16)

    def __init__(self, device, size: int, longest: int):
        self._half = device_zeros(device, size, array_dtype("bfloat16"))
        self._values = device_zeros(device, longest)

    def packed(self, flat, part: slice, errors=None):
        values = flat[part]
        half = self._half[part]
        if errors is None:
            half[:] = values
        else:
            lost = errors[part]
            lost += values  # the exact values
            half[:] = lost
            values[:] = half  # the rounded values
            lost -= values
        return half.view(self.dtype)

    def unpacked(self, received):
        values = self._values[: len(received)]
        values[:] = received.view(self._half.dtype)
        return values

    def gathered(self, flat, part: slice):
        return self._half[part].view(self.dtype)

    def arrived(self, flat, part: slice) -> None:
        flat[part] = self._half[part]


def new_device_wire(device, wire_format: WireFormat, size: int, longest: int):
    """Return the wire of that format for vectors on a GPU."""
    return DeviceBFloat16Wire(device, size, longest) if wire_format.is_lossy else DeviceFloat32Wire()
