"""Parse the values of flags: rates, sizes, times, counts, percentages.

Each function is a `type` for argparse and may be called on its own. If a text cannot be parsed, it raises UnitError
with a line that names the text and the expected format.
"""

import argparse
import re
from fractions import Fraction

NUMBER = r"(\d+(?:\.\d+)?)"
BITS = {"bit": 1, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
MOST = 1e18  # of any value: more is a typing error, and does not fit 64 bits
LEAST_RATE = 1e3  # bits/s; slower than this is a typing error
LEAST_CORES = 0.01
MOST_CORES = 4096
SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
BYTES = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


class UnitError(argparse.ArgumentTypeError, ValueError):
    """A text that cannot be parsed. Two base classes: argparse prints only an ArgumentTypeError's message."""


def bits_per_s(text: str) -> float:
    """Parse "400mbit" to 400e6, in the notation of tc."""
    match = re.fullmatch(NUMBER + r"([kmgt]?bit)", text.lower())
    rate = float(match[1]) * BITS[match[2]] if match else 0
    if not LEAST_RATE <= rate <= MOST:
        raise UnitError(f"{text[:40]!r} is not a rate: expected 1kbit or more, written as 400mbit, 2.5gbit or 800kbit")
    return rate


def core_count(text: str) -> float:
    """Parse "0.4" to 0.4 cores."""
    count = float(text) if re.fullmatch(NUMBER, text, re.ASCII) else 0.0
    if not LEAST_CORES <= count <= MOST_CORES:
        raise UnitError(f"{text[:40]!r} is not a number of cores: expected {LEAST_CORES} to {MOST_CORES}, like 0.4")
    return count


def bytes_per_s(text: str) -> float:
    """Parse "400mbit" to 50e6."""
    return bits_per_s(text) / 8


def duration_s(text: str) -> float:
    """Parse "20us" to 2e-5."""
    match = re.fullmatch(NUMBER + r"(ns|us|ms|s)", text)
    time_s = float(match[1]) * SECONDS[match[2]] if match else MOST
    if time_s >= MOST:
        raise UnitError(f"{text[:40]!r} is not a time: expected 20us, 1.5ms or the like")
    return time_s


def count_of(text: str) -> int:
    """Parse "124M" to 124000000."""
    match = re.fullmatch(NUMBER + r"([KMBT]?)", text.upper())
    count = float(match[1]) * COUNTS[match[2]] if match else 0
    if not 0.5 < count <= MOST:
        raise UnitError(f"{text[:40]!r} is not a count: expected 124M, 1.5B or a number")
    return round(count)


def sizes(text: str) -> list[int]:
    """Parse "8MB,64MB" to [8000000, 64000000] bytes."""
    found = [re.fullmatch(NUMBER + r"\s*(|[KMG]I?)B?", word.upper()) for word in text.split(",")]
    counts = [float(match[1]) * BYTES[match[2]] if match else 0.0 for match in found]
    if not all(0 < count <= MOST for count in counts):
        raise UnitError(f"{text[:40]!r} is not a list of sizes: expected 8MB, or 8MB,64MiB, or 8000000")
    return [int(count) for count in counts]


def size_in_bytes(text: str) -> int:
    """Parse "512KiB" to 524288."""
    try:
        (count,) = sizes(text)
    except ValueError:  # not exactly one size
        raise UnitError(f"{text[:40]!r} is not a size: expected one, like 512KiB or 600MB") from None
    return count


def integer(text: str, low: int, high: int) -> int:
    """Parse "1_000_000" to 1000000. low, high: the smallest and the largest allowed number."""
    if not re.fullmatch(r"\d{1,20}(_\d{1,20})*", text) or not low <= int(text) <= high:
        raise UnitError(f"{text!r}, expected an integer from {low} to {high}")
    return int(text)


def percent(text: str) -> Fraction:
    """Parse a percentage exactly, so that a text is cut at the same character on every machine."""
    if not re.fullmatch(r"\d{1,2}(\.\d{0,6})?", text):
        raise UnitError(f"{text!r}, expected a number from 0 to below 100, such as 0.5")
    return Fraction(text)


def repetitions(text: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text) or int(text) < 1:
        raise UnitError(f"{text[:40]!r} rounds, expected 1 or more")
    return int(text)
