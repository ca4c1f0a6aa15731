"""A GPU for the cases of tests/gpu/cuda_shim, whose arrays are NumPy's: each launch copies them there and back."""

import numpy as np

from tests.gpu.cuda_shim.shim import Shim

MARGIN = 64  # bytes


class Mirror(Shim):
    """On the GPU arrays are as far from a multiple of 16 bytes as on the host, between margins that must stay."""

    def __init__(self, device):
        super().__init__(None)
        self._device = device

    def launch(self, source, storage, kernel, grid, block, arguments, shared_bytes=0):
        copies = [self._copy(argument) if isinstance(argument, np.ndarray) else None for argument in arguments]
        on_gpu = [a if copy is None else copy[1] for a, copy in zip(arguments, copies, strict=True)]
        self._device.launch(source, storage, kernel, grid, block, tuple(on_gpu), shared_bytes)
        for argument, copy in zip(arguments, copies, strict=True):
            if copy is not None:
                self._copy_back(argument, copy[0])

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
