"""The flat buffers of a rank on its GPU, for exchanges that start and end there."""

from functools import partial

import ml_dtypes
import numpy as np

from dist.buffers import OwnBuffers
from dist.sharded import ShardedGradients, ShardedParameters, Slots


def array_dtype(name: str) -> np.dtype:
    """Return the dtype of arrays of float32 or bfloat16, in NumPy and in CuPy."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def device_zeros(device, length: int, dtype=np.float32):
    """Return (length,) zeros on a GPU."""
    return device.empty((length,), dtype)


class OnDevice:
    """Mixin that puts buffers of dist/buffers.py or dist/sharded.py on a GPU (DEVICE_BUFFERS).

    host_parameters: host memory for the ranges in use, filled before training, and by `fetch` for a checkpoint.
    """

    def __init__(self, device, world, size: int, ranges):
        self._device = device
        super().__init__(world, size, ranges, partial(device_zeros, device))
        self.host_parameters = Slots(ranges)

    def filled(self, start: int, stop: int) -> None:
        """Copy the initial parameters of a range, written on the host, to the GPU."""
        self.parameters[start:stop].set(self.host_parameters[start:stop])
        super().filled(start, stop)

    def fetch(self, start: int, stop: int) -> None:
        """Copy a range of the parameters to the host."""
        self.host_parameters[start:stop][:] = self._device.download(self.parameters[start:stop])


DEVICE_BUFFERS = {  # {the class that a strategy names: its version on a GPU}
    kind: type(f"Device{kind.__name__}", (OnDevice, kind), {})
    for kind in (OwnBuffers, ShardedGradients, ShardedParameters)
}
