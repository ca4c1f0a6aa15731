"""A GPU for the cases of tests/gpu/cuda_shim, whose arrays are NumPy's: each launch copies them there and back."""

import numpy as np

from tests.gpu.cuda_shim.shim import Shim

MARGIN = 64  # bytes


class Mirror(Shim):
    """On the GPU arrays are as far from a multiple of 16 bytes as on the host, between margins that must stay."""

    def __init__(self, device):
        super().__init__(None)
        self._device = device
        self.multiprocessors, self.multiprocessor_bytes = device.multiprocessors, device.multiprocessor_bytes

    def launch(self, source, storage, kernel, grid, block, arguments, shared_bytes=0):
        arrays = {_place(argument): argument for argument in arguments if isinstance(argument, np.ndarray)}
        copies = {place: self._copy(array) for place, array in arrays.items()}  # one, however often it is passed
        on_gpu = [copies[_place(a)][1] if isinstance(a, np.ndarray) else a for a in arguments]
        self._device.launch(source, storage, kernel, grid, block, tuple(on_gpu), shared_bytes)
        for place, array in arrays.items():
            self._copy_back(array, copies[place][0])

    def _copy(self, array):
        start = MARGIN + array.ctypes.data % 16
        host = np.full(start + array.nbytes + MARGIN, 0xFF, np.uint8)
        host[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        buffer = self._device.cupy.asarray(host)
        return buffer, buffer[start : start + array.nbytes]

    def _copy_back(self, array, buffer):
        host, start = self._device.download(buffer), MARGIN + array.ctypes.data % 16
        array[...] = host[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        assert (host[:start] == 0xFF).all(), "a kernel wrote before an array"
        assert (host[start + array.nbytes :] == 0xFF).all(), "a kernel wrote past an array"


def _place(array):
    """Of a host array in memory: address and bytes."""
    return array.ctypes.data, array.nbytes
