"""Progress of bench_exchange.py on stderr: results, the running contender, the remaining time.

Rank 0 prints a new line every few seconds at most: under mpirun stderr is no terminal that could update a line.
"""

import time

from dist.console import say
from traces.units import bytes_text, duration_text, seconds_text

LINE_S = 5.0  # the shortest time between two lines
MOST_RESULTS = 6  # in a line


class ExchangeProgress:
    """Prints progress as turns begin and end. For rank 0.

    sizes: bytes of the vectors. names: the contenders, which take turns at each size. repeat: turns of each contender.
    """

    def __init__(self, sizes: list[int], names: list[str], repeat: int):
        self._names = names
        self._repeat = repeat
        self._all_bytes = sum(sizes) * len(names) * repeat  # the sum over all turns
        self._done_bytes = 0
        self._start = time.monotonic()
        self._printed_at = self._start
        self._results = []  # not printed yet

    def begin_turn(self, size_bytes: int, turn: int, name: str) -> None:
        now = time.monotonic()
        if now - self._printed_at < LINE_S:
            return
        self._printed_at = now
        place = f"{self._names.index(name) + 1} of {len(self._names)}"
        results = f": {', '.join(self._results[-MOST_RESULTS:])}" if self._results else ""
        self._results = []
        left = f", about {duration_text(self.left_s())} left" if self._done_bytes else ""
        text = f"{bytes_text(size_bytes)}, round {turn + 1} of {self._repeat}{left}{results}; now {name} ({place})"
        say(text, on_stderr=True)

    def end_turn(self, size_bytes: int, name: str, seconds: float) -> None:
        """End a turn, whose measured exchange took `seconds`."""
        self._done_bytes += size_bytes
        self._results.append(f"{name} {seconds_text(seconds)}")

    def left_s(self) -> float:
        """Estimate the seconds of all remaining turns, in proportion to the vectors' bytes."""
        return (time.monotonic() - self._start) * (self._all_bytes / self._done_bytes - 1)
