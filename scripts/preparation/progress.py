"""How far prepare.py is: a line kept up to date on a terminal, and in a log one every half minute."""

import sys
import time

from dist.console import say

TERMINAL_S, LOG_S = 0.2, 30.0


class ProgressLine:
    """How much of `total` units, such as bytes, is done. what: a word for the work, such as "reading". On stderr."""

    def __init__(self, what: str, unit: str, total: int):
        self._what, self._unit, self._total, self._done, self._skipped = what, unit, total, 0, 0
        self._terminal = sys.stderr.isatty()
        self._started = self._printed = time.monotonic()

    def skip(self, amount: int) -> None:
        """Count `amount` as done before: it says nothing about how quickly the rest goes."""
        self._skipped = self._done = amount
        self._started = time.monotonic()

    def advance(self, amount: int) -> None:
        self._done += amount
        now = time.monotonic()
        if now - self._printed >= (TERMINAL_S if self._terminal else LOG_S):
            self._printed = now
            start, end = ("\r", "\033[K") if self._terminal else ("", "\n")
            say(f"{start}{self._line(now - self._started)}{end}", end="", on_stderr=True)

    def _line(self, seconds: float) -> str:
        rate = max(self._done - self._skipped, 1) / max(seconds, 1e-9)
        minutes, rest = divmod(round((self._total - self._done) / rate), 60)
        done = f"{self._what} {self._done / max(self._total, 1):4.0%} of {self._total:,} {self._unit}"
        return f"{done}, {rate / 1e6:.1f} M/s, {minutes}:{rest:02} left"

    def __enter__(self):
        return self

    def __exit__(self, *unused) -> None:
        if self._terminal:
            say("\r\033[K", end="", on_stderr=True)
