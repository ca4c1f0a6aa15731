"""int8 on the wire: blocks of INT8_BLOCK values share a scale, as in Dettmers et al. 2022 (arXiv 2110.02861).

    scale = max |x| / 127, rounded up to bfloat16;  code = round(x / scale) to nearest, ties to even
    the value that arrives is code * scale

The smaller the blocks, the nearer are a block's largest and smallest gradients. bfloat16 scales make room for them.

A scale is at least 2^-126, so blocks of zeros or of denormal numbers are no special cases. A block with a NaN or
infinity has a negative scale, -max |x| / 126 of its finite values; its codes 127, -127 and -128 are inf, -inf and NaN.

Without fastmath each operation is IEEE float32: all ranks get the same bits. Importing this module compiles its loops.
"""

import numba
import numpy as np

from dist.wire import BFLOAT16, INT8_BLOCK

_LEAST_SCALE = np.float32(2.0**-126)
_SHIFT = np.float32(1.5 * 2**23)  # x + _SHIFT rounds |x| <= 127 to a whole number, the lowest byte of the sum's bits
_MOST = np.float32(127)
_INFINITY = np.uint32(0x7F800000)  # the bits of infinity; without the sign bit, those of a NaN are larger
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_SPECIAL = np.uint16(0x8000)  # the sign bit of a scale


def pack(values, errors, scales, codes) -> None:
    """Write values + errors (n,) float32 to codes (n,) int8 and the bits of scales (blocks,) uint16.

    Leave in `errors` what this loses.
    """
    _pack(values, errors, scales, codes)
    for block in np.flatnonzero(scales >= _SPECIAL):
        part = slice(block * INT8_BLOCK, (block + 1) * INT8_BLOCK)
        scales[block] = _pack_special(errors[part], codes[part])


def unpack(scales, codes, values, adds: bool) -> None:
    """Write code * scale to values (n,) float32, or add it if `adds`."""
    _unpack(scales, codes, values, adds)
    for block in np.flatnonzero(scales >= _SPECIAL):
        part = slice(block * INT8_BLOCK, (block + 1) * INT8_BLOCK)
        found = codes[part] * -scales[block : block + 1].view(BFLOAT16).astype(np.float32)
        for code, special in ((127, np.inf), (-127, -np.inf), (-128, np.nan)):
            found[codes[part] == code] = special
        with np.errstate(invalid="ignore"):  # inf - inf
            values[part] = values[part] + found if adds else found


def _pack_special(values, codes):
    """Pack one block with a NaN or infinity, and return the bits of its scale. No NaN may stay among the errors."""
    is_finite = np.isfinite(values)
    known = np.where(is_finite, values, np.float32(0))
    bits = max(np.abs(known).max() / np.float32(126), _LEAST_SCALE).view(np.uint32) + np.uint32(0xFFFF) >> 16
    scale = (bits << 16).view(np.float32)
    codes[:] = np.where(is_finite, np.rint(known / scale), np.select([values > 0, values < 0], [127, -127], -128))
    values[:] = np.where(is_finite, known - codes * scale, np.float32(0))
    return bits | _SPECIAL


@numba.njit("(float32[::1], float32[::1], uint16[::1], int8[::1])", nogil=True, error_model="numpy")
def _pack(values, errors, scales, codes):
    for block in range(len(scales)):
        start = block * INT8_BLOCK
        stop = min(start + INT8_BLOCK, len(values))
        added = values[start:stop]
        left = errors[start:stop]
        packed = codes[start:stop]
        largest = np.uint32(0)
        for i in range(len(left)):
            value = added[i] + left[i]
            left[i] = value
            largest = max(largest, np.uint32(np.float32(value).view(np.uint32) & _MAGNITUDE))
        if largest >= _INFINITY:
            scales[block] = _SPECIAL
            continue
        scale = max(np.uint32(largest).view(np.float32) / _MOST, _LEAST_SCALE)
        scales[block] = np.uint16(np.uint32(np.float32(scale).view(np.uint32) + np.uint32(0xFFFF)) >> 16)
        scale = np.uint32(np.uint32(scales[block]) << 16).view(np.float32)
        for i in range(len(left)):
            shifted = left[i] / scale + _SHIFT
            packed[i] = np.int8(np.float32(shifted).view(np.int32))
            left[i] -= (shifted - _SHIFT) * scale


@numba.njit("(uint16[::1], int8[::1], float32[::1], boolean)", nogil=True, error_model="numpy")
def _unpack(scales, codes, values, adds):
    for block in range(len(scales)):
        start = block * INT8_BLOCK
        stop = min(start + INT8_BLOCK, len(values))
        packed = codes[start:stop]
        unpacked = values[start:stop]
        if scales[block] >= _SPECIAL:
            continue
        scale = np.uint32(np.uint32(scales[block]) << 16).view(np.float32)
        for i in range(len(unpacked)):
            value = np.float32(packed[i]) * scale
            unpacked[i] = unpacked[i] + value if adds else value
