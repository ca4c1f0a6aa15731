"""Arrays as kernels get them: in either storage, and with margins that no kernel may write to."""

import numpy as np

MARGIN_BYTES = 64


def to_bfloat16(values):
    """float32 values rounded to bfloat16, to nearest, ties to even, as uint16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def widen(array):
    """float64 values of an array in either storage, bfloat16 as ml_dtypes' or its bits; other arrays as they are."""
    if array.itemsize == 2:
        array = (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64) if array.dtype == np.float32 else array


class Memory:
    """Makes arrays in one storage, aligned to 16 bytes, between margins of NaNs; values come from a fixed seed."""

    def __init__(self, storage):
        self.storage, self.random, self._buffers = storage, np.random.default_rng(11), []

    def put(self, values, offset=0):
        """`values` in the storage. offset: this many elements past a multiple of 16 bytes."""
        values = np.asarray(values, np.float32)
        return self.put_exactly(to_bfloat16(values) if self.storage == "bfloat16" else values, offset)

    def put_exactly(self, values, offset=0):
        """`values` in their own dtype."""
        front = MARGIN_BYTES + offset * values.itemsize
        buffer = np.full(front + values.nbytes + MARGIN_BYTES + 16, 0xFF, np.uint8)
        buffer = buffer[-buffer.ctypes.data % 16 :]
        array = buffer[front : front + values.nbytes].view(values.dtype).reshape(values.shape)
        array[...] = values
        self._buffers.append((buffer, front, front + values.nbytes))
        return array

    def normal(self, *shape):
        """Normally distributed values in the storage."""
        return self.put(self.random.standard_normal(shape))

    def nans(self, *shape, dtype=None):
        """NaNs: what a kernel has to overwrite without reading it."""
        values = np.full(shape, np.nan, np.float32)
        return self.put(values) if dtype is None else self.put_exactly(values.astype(dtype))

    def assert_margins_kept(self):
        """No kernel has written beside an array."""
        for buffer, start, stop in self._buffers:
            assert (buffer[:start] == 0xFF).all()
            assert (buffer[stop:] == 0xFF).all()
