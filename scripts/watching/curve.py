"""Bars and a curve made of characters: blocks and dots if the terminal can show them, else ASCII."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

BRAILLE = 0x2800
# The bit for each dot of a braille character, by row and column.
DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
LABEL = 8  # columns of the numbers beside a curve


@dataclass(frozen=True)
class Glyphs:
    """Characters to draw with.

    full, empty: the characters of a bar. parts: characters of a stacked bar, for computing, moving data, waiting, rest.
    has_dots: whether curves are drawn with braille dots, 2 by 4 in a character.
    """

    full: str
    empty: str
    parts: tuple[str, ...]
    has_dots: bool

    def bar(self, share: float, width: int) -> str:
        """Draw a bar of `width` characters that is filled to `share`, from 0 to 1."""
        filled = round(min(1.0, max(0.0, share)) * width)
        return self.full * filled + self.empty * (width - filled)

    def stacked(self, amounts: Sequence[float], largest: float, width: int) -> str:
        """Draw parts side by side; an amount of `largest` fills the width. Only the parts' ends are rounded."""
        scale = max(0, width) / largest if largest > 0 else 0.0
        edges = [round(edge * scale) for edge in (0.0, *np.cumsum(amounts))]
        drawn = "".join(sign * (end - start) for sign, (start, end) in zip(self.parts, pairwise(edges), strict=True))
        return f"{drawn:<{max(0, width)}}"


BLOCKS = Glyphs("█", "░", ("█", "▒", "·", "-"), has_dots=True)
ASCII = Glyphs("#", ".", ("#", "=", ".", "-"), has_dots=False)


def glyphs_for(encoding: str | None) -> Glyphs:
    """Return block characters if a stream with this encoding can show them, else ASCII."""
    try:
        "█░▒·⣿".encode(encoding or "ascii")
    except (UnicodeError, LookupError):
        return ASCII
    return BLOCKS


def curve_lines(points: list[tuple[int, float]], columns: int, height: int, glyphs: Glyphs) -> list[str]:
    """Draw a curve of (step, value) in `height` lines. The last line is the axis with the first and the last step.

    A column shows the median of its values; empty columns are interpolated. Values that are not finite are ignored.
    """
    steps, values = np.array(points, float).T
    steps = steps[np.isfinite(values)]
    values = values[np.isfinite(values)]
    rows = height - 1
    width = columns - LABEL - 2
    if not len(values) or rows < 1 or width < 4:
        return ["no finite loss"] if not len(values) else []
    across, down = (2, 4) if glyphs.has_dots else (1, 1)
    medians = _columns(steps, values, width * across)
    low = medians.min()
    high = medians.max()
    places = (high - medians) / max(high - low, 1e-12) * (rows * down - 1)
    dots = np.zeros((rows * down, width * across), bool)
    dots[np.rint(places).astype(int), np.arange(width * across)] = True
    text = _braille(dots) if glyphs.has_dots else ["".join("*" if dot else " " for dot in row) for row in dots]
    labels = [f"{high:.4g}", *[""] * (rows - 2), f"{low:.4g}"][:rows]
    axis = f"{'step':>{LABEL}}  {steps[0]:.0f}".ljust(columns - len(f"{steps[-1]:.0f}")) + f"{steps[-1]:.0f}"
    return [f"{label:>{LABEL}}  {line.rstrip()}" for label, line in zip(labels, text, strict=True)] + [axis]


def _columns(steps: np.ndarray, values: np.ndarray, count: int) -> np.ndarray:
    """Return (count,) medians of the values of each column, interpolated for columns without values."""
    span = max(steps[-1] - steps[0], 1.0)
    column = np.rint((steps - steps[0]) / span * (count - 1)).astype(int)
    used = np.unique(column)
    return np.interp(np.arange(count), used, [np.median(values[column == one]) for one in used])


def _braille(dots: np.ndarray) -> list[str]:
    """Return lines of characters, each for 4 by 2 dots."""
    rows, columns = dots.shape
    cells = dots.reshape(rows // 4, 4, columns // 2, 2).transpose(0, 2, 1, 3)
    codes = (cells * DOTS).sum(axis=(2, 3))
    return ["".join(chr(BRAILLE + code) if code else " " for code in row) for row in codes.tolist()]
