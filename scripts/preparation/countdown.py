"""Show on stderr how much of the work is done and how long the rest takes."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dist.console import say
from traces.units import duration_text

TERMINAL_S = 0.2  # between two updates of the line on a terminal
LOG_S = 30.0  # between two lines of a log


@contextmanager
def countdown(what: str, unit: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yield advance(amount), which counts an amount of `total` as done and prints a line if it is due.

    what: the work, such as "reading". unit: such as "bytes".
    """
    done = 0
    is_terminal = sys.stderr.isatty()
    started = time.monotonic()
    printed = started

    def advance(amount: int) -> None:
        nonlocal done, printed
        done += amount
        now = time.monotonic()
        if done and now - printed >= (TERMINAL_S if is_terminal else LOG_S):
            printed = now
            rate = done / (now - started)
            left = duration_text((total - done) / rate)
            line = f"{what} {done / total:4.0%} of {total:,} {unit}, {rate / 1e6:.1f} M/s, {left} left"
            say(f"\r{line}\033[K" if is_terminal else f"{line}\n", end="", on_stderr=True)

    try:
        yield advance
    finally:
        if is_terminal:
            say("\r\033[K", end="", on_stderr=True)
