"""Show on stderr how much of the work is done and how long the rest takes."""

import sys
import time

from dist.console import say
from traces.units import duration_text

TERMINAL_S = 0.2  # between two updates of the line on a terminal
LOG_S = 30.0  # between two lines of a log


class Countdown:
    """A line that shows how much of `total` is done. what: the work, such as "reading". unit: such as "bytes"."""

    def __init__(self, what: str, unit: str, total: int):
        self._what = what
        self._unit = unit
        self._total = total
        self._done = 0
        self._is_terminal = sys.stderr.isatty()
        self._started = time.monotonic()
        self._printed = self._started

    def advance(self, amount: int) -> None:
        """Count `amount` as done, and print the line if it is due."""
        self._done += amount
        now = time.monotonic()
        if self._done and now - self._printed >= (TERMINAL_S if self._is_terminal else LOG_S):
            self._printed = now
            rate = self._done / (now - self._started)
            left = duration_text((self._total - self._done) / rate)
            done = f"{self._what} {self._done / self._total:4.0%} of {self._total:,} {self._unit}"
            line = f"{done}, {rate / 1e6:.1f} M/s, {left} left"
            say(f"\r{line}\033[K" if self._is_terminal else f"{line}\n", end="", on_stderr=True)

    def __enter__(self):
        return self

    def __exit__(self, *unused) -> None:
        if self._is_terminal:
            say("\r\033[K", end="", on_stderr=True)
