"""Parameters as files hold them, little-endian float32, float16 or bfloat16, from and to float32 arrays in host memory.

A bfloat16 is the upper half of a float32: reading one is exact. Writing rounds to the nearest, ties to even.
"""

import numpy as np

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
WRITTEN = ("float32", "bfloat16")
PIECE = 1 << 18  # elements that are converted at once


def read_numbers(file, out: np.ndarray, stored: str) -> None:
    """Fill `out`, contiguous float32 of any shape, with numbers of type `stored` from where the binary file stands.

    OSError: it ends before.
    """
    flat = out.reshape(-1)
    if stored == "float32":
        _read_exactly(file, flat)
        return
    for start in range(0, flat.size, PIECE):
        part = flat[start : start + PIECE]
        halves = np.empty(part.size, "<u2")
        _read_exactly(file, halves)
        if stored == "float16":
            part[:] = halves.view("<f2")
        else:
            bits = part.view(np.uint32)
            bits[:] = halves
            bits <<= 16


def _read_exactly(file, out: np.ndarray) -> None:
    count = file.readinto(out)
    if count != out.nbytes:
        raise OSError(f"ends {out.nbytes - count} bytes too early")


def write_numbers(file, values: np.ndarray, stored: str) -> None:
    """Append contiguous float32 values of any shape to a binary file as numbers of type `stored`, one of WRITTEN."""
    flat = values.reshape(-1)
    for start in range(0, flat.size, PIECE):
        part = flat[start : start + PIECE]
        file.write(part if stored == "float32" else to_bfloat16(part))


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """The bits (n,) uint16 of float32 values (n,) rounded to bfloat16; a NaN stays one, too large becomes infinite."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2")
    nan = np.isnan(values)
    # The carry would turn some NaNs into zero or infinity.
    rounded[nan] = (bits[nan] >> 16) | 0x40
    return rounded
