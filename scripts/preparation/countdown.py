"""Show on stderr how much of the work is done and how long the rest takes."""

import sys
import time

from dist.console import say
from traces.units import duration_text

TERMINAL_S = 0.2  # between two updates of the line on a terminal
LOG_S = 30.0  # between two lines of a log


class Countdown:
    """A line that shows how much of `total` is done. what: the work, such as "reading". unit: such as "bytes".

    skipped: how much an earlier start has done; it does not count in the estimated speed.
    """

    def __init__(self, what: str, unit: str, total: int, skipped: int = 0):
        self._what = what
        self._unit = unit
        self._total = total
        self._skipped = skipped
        self._done = skipped
        self._is_terminal = sys.stderr.isatty()
        self._started = time.monotonic()
        self._printed = self._started

    def advance(self, amount: int) -> None:
        """Count `amount` as done, and print the line if it is due."""
        self._done += amount
        now = time.monotonic()
        if now - self._printed >= (TERMINAL_S if self._is_terminal else LOG_S):
            self._printed = now
            line = self._line(now - self._started)
            say(f"\r{line}\033[K" if self._is_terminal else f"{line}\n", end="", on_stderr=True)

    def _line(self, seconds: float) -> str:
        rate = max(self._done - self._skipped, 1) / max(seconds, 1e-9)
        left = duration_text((self._total - self._done) / rate)
        done = f"{self._what} {self._done / max(self._total, 1):4.0%} of {self._total:,} {self._unit}"
        return f"{done}, {rate / 1e6:.1f} M/s, {left} left"

    def __enter__(self):
        return self

    def __exit__(self, *unused) -> None:
        if self._is_terminal:
            say("\r\033[K", end="", on_stderr=True)
