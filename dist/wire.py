"""The wire format of a float32 vector: its segments, unchanged or rounded to bfloat16 or int8.

An exchange sends each element at most once as a partial sum (`packed`, `unpacked`), and then once as a final value, in
the all-gather: its owner rounds it (`rounded`), and everyone passes on the same bits (`gathered`, `arrived`).
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from dist.probe.links import MOST_SEGMENT_BYTES
from dist.ranges import cut_range

OPERATIONS = ("mpi", "own")  # --op: which sum MPI's collectives use
INT8_BLOCK = 64  # values that share a bfloat16 scale (dist/host/int8_blocks.py)
SCALE_BYTES = 2
WIRE_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1 + SCALE_BYTES / INT8_BLOCK}  # of one element, by --wire
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
LANDING_BYTES = 1 << 20  # of all receives that are posted ahead
LEAST_AHEAD = 4  # the least number of these receives


@dataclass(frozen=True)
class WireFormat:
    """How all exchanges of a job send their vectors.

    wire: a key of WIRE_BYTES. segment_bytes: the most that one message holds (dist/probe/links.py). error_feedback:
    whether to keep rounding errors and add them to the next sum. operation: of MPI's collectives (OPERATIONS).
    """

    wire: str = "float32"
    segment_bytes: int = MOST_SEGMENT_BYTES
    error_feedback: bool = False
    operation: str = "mpi"

    @property
    def is_lossy(self) -> bool:
        return self.wire != "float32"

    @property
    def item_bytes(self) -> float:
        return WIRE_BYTES[self.wire]

    def new(self, size: int) -> "PlainWire | Int8Wire":
        """Return the wire for vectors of `size` elements in host memory."""
        if not self.is_lossy:
            return PlainWire(self.segment_bytes)
        if self.wire == "int8":
            return Int8Wire(size, self.segment_bytes, self.error_feedback)
        return BFloat16Wire(size, self.segment_bytes, self.error_feedback)


class PlainWire:
    """Sends the vector's own memory, and receives final values straight into it.

    segment_bytes: the most that one message holds. dtype: of the vector. errors: rounding errors, or None.
    """

    errors = None

    def __init__(self, segment_bytes: int, dtype=np.float32):
        self.dtype = np.dtype(dtype)
        self.segment_length = max(1, segment_bytes // self.dtype.itemsize)
        self.receives_ahead = max(LEAST_AHEAD, LANDING_BYTES // segment_bytes)

    def segments(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Cut [start, stop) into nearly equal segments, one message each."""
        count = max(1, -(-(stop - start) // self.segment_length))
        return cut_range(start, stop, count)

    def packed(self, flat, start, stop):
        """Return the buffer to send for flat[start:stop], a partial sum; it must not change until the exchange ends."""
        return flat[start:stop]

    def unpacked(self, received):
        """Return the float32 values of a received segment; valid until the next call."""
        return received

    def rounded(self, flat, start, stop) -> None:
        """Round final values to what the others will receive."""

    def gathered(self, flat, start, stop):
        """Return the buffer that final values of flat[start:stop] are received into and sent from."""
        return flat[start:stop]

    def arrived(self, flat, start, stop) -> None:
        """Write what arrived in the buffer of `gathered` into flat."""


class BFloat16Wire(PlainWire):
    """bfloat16 on the wire, sums in float32: half the bytes (Kalamkar et al. 2019), rounded to nearest, ties to even.

    size: elements of the vector. error_feedback: the rank that rounds keeps the rounding error, and adds it to the same
    element in the next exchange (Seide et al. 2014, Karimireddy et al. 2019).
    """

    def __init__(self, size: int, segment_bytes: int, error_feedback: bool = False):
        super().__init__(segment_bytes, np.uint16)  # MPI has no bfloat16: the bits travel as whole numbers
        self.half = np.zeros(size, np.uint16)
        self.errors = np.zeros(size, np.float32) if error_feedback else None
        self._values = np.zeros(0, np.float32)

    def packed(self, flat, start, stop):
        if self.errors is not None:
            flat[start:stop] += self.errors[start:stop]
        round_to_bfloat16(flat[start:stop], self.half[start:stop])
        if self.errors is not None:
            with np.errstate(invalid="ignore"):  # an infinite gradient gives a NaN, which Strategy.clip drops
                np.subtract(flat[start:stop], self.unpacked(self.half[start:stop]), out=self.errors[start:stop])
        return self.half[start:stop]

    def unpacked(self, received):
        if len(self._values) < len(received):
            self._values = np.empty(len(received), np.float32)
        values = self._values[: len(received)]
        widen(received, values)
        return values

    def rounded(self, flat, start, stop) -> None:
        self.packed(flat, start, stop)
        self.arrived(flat, start, stop)

    def gathered(self, flat, start, stop):
        return self.half[start:stop]

    def arrived(self, flat, start, stop) -> None:
        widen(self.half[start:stop], flat[start:stop])


class Int8Wire:
    """int8 on the wire in blocks with a scale (dist/host/int8_blocks.py), sums in float32, for DirectExchange.

    errors: as of BFloat16Wire. A message is one segment: the scales of its blocks, then a byte for each value.
    """

    def __init__(self, size: int, segment_bytes: int, error_feedback: bool = True):
        from dist.host import int8_blocks  # slow to import: it compiles

        self._blocks = int8_blocks
        self.errors = np.zeros(size, np.float32) if error_feedback else None
        self.segment_length = INT8_BLOCK * max(1, segment_bytes // (INT8_BLOCK + SCALE_BYTES))

    def segments(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Cut [start, stop) into whole blocks, all but the last: segment_bytes then changes no block and no bit."""
        length = self.segment_length
        return [(low, min(low + length, stop)) for low in range(start, stop, length)]

    def message(self, start: int, stop: int) -> np.ndarray:
        """Return memory for the message of flat[start:stop]."""
        return np.empty(stop - start + SCALE_BYTES * -(-(stop - start) // INT8_BLOCK), np.uint8)

    def packed(self, flat, start, stop) -> np.ndarray:
        """Return the message of flat[start:stop], with the errors so far. Keep the new errors."""
        message = self.message(start, stop)
        errors = np.zeros(stop - start, np.float32) if self.errors is None else self.errors[start:stop]
        self._blocks.pack(flat[start:stop], errors, *_parts(message, stop - start))
        return message

    def unpack(self, message, flat, start, stop, adds: bool = False) -> None:
        """Write the values of a message to flat[start:stop], or add them there."""
        self._blocks.unpack(*_parts(message, stop - start), flat[start:stop], adds)


def _parts(message: np.ndarray, length: int):
    """Return (bits of the scales, codes) of an int8 message of `length` values."""
    return message[:-length].view(np.uint16), message[-length:].view(np.int8)


def widen(half: np.ndarray, values: np.ndarray) -> None:
    """Write half (n,) uint16, the bits of bfloat16 numbers, to values (n,) float32."""
    values[:] = half.view(BFLOAT16)


def round_to_bfloat16(values: np.ndarray, half: np.ndarray) -> None:
    """Round values (n,) float32 to bfloat16, to nearest, ties to even; write the bits to half (n,) uint16.

    Infinities and NaNs are kept, without a warning: if training diverges, the loss shows it.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        half.view(BFLOAT16)[:] = values
