"""Draw bars with characters: blocks if the terminal can show them, else ASCII."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np


@dataclass(frozen=True)
class Glyphs:
    """Characters to draw with.

    full, empty: the characters of a bar. parts: characters of a stacked bar, for computing, moving data, waiting, rest.
    """

    full: str
    empty: str
    parts: tuple[str, ...]

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


BLOCKS = Glyphs("█", "░", ("█", "▒", "·", "-"))
ASCII = Glyphs("#", ".", ("#", "=", ".", "-"))


def glyphs_for(encoding: str | None) -> Glyphs:
    """Return block characters if a stream with this encoding can show them, else ASCII."""
    try:
        "█░▒·".encode(encoding or "ascii")
    except (UnicodeError, LookupError):
        return ASCII
    return BLOCKS
