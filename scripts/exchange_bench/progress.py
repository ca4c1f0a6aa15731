"""What bench_exchange.py says and keeps while it measures: results, what runs now, how long the rest takes.

Rank 0 says it on stderr, a line every few seconds at most: under mpirun that is no terminal whose line could be kept up
to date. What is measured so far is in the JSON file all the time, so that a run which is cut short leaves it.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path

from dist.console import say
from gpt2.errors import UserError
from gpt2.files import write_json
from traces.units import bytes_text, duration_text, seconds_text

LINE_S = 5.0  # between two lines, at least
KEEP_S = 2.0  # between two writings of the file, at least
MOST_RESULTS = 6  # in a line


class Progress:
    """Told, on rank 0, of each contender that begins and ends in a round.

    sizes: bytes of all vectors, in their order; repeat: rounds of each; say_line: prints a line.
    """

    def __init__(self, sizes: list[int], repeat: int, say_line: Callable[[str], None] | None = None):
        self._sizes, self._repeat, self._at = list(sizes), repeat, -1
        self._say = say_line or (lambda text: say(text, on_stderr=True))
        self._said_at, self._news = time.monotonic(), []
        self._turns, self._expected, self._begun = {}, {}, None  # seconds by contender

    def begin_size(self, names) -> None:
        """The next size: these contenders take turns."""
        before = {name: self._turn_s(name) for name in self._turns}
        self._at += 1
        larger = self._sizes[self._at] / self._sizes[max(0, self._at - 1)]
        self._expected = {name: seconds * larger for name, seconds in before.items() if seconds is not None}
        self._turns, self._begun = {name: [] for name in names}, None

    def begins(self, name: str, round_number: int) -> None:
        now = self._begun = time.monotonic()
        if now - self._said_at < LINE_S:
            return
        self._said_at = now
        place = f"{list(self._turns).index(name) + 1} of {len(self._turns)}"
        news, self._news = self._news[-MOST_RESULTS:], []
        results = f": {', '.join(news)}" if news else ""
        left = "" if (left_s := self.left_s()) is None else f", about {duration_text(left_s)} left"
        self._say(
            f"{bytes_text(self._sizes[self._at])}, round {round_number + 1} of {self._repeat}{left}{results}; "
            f"now {name} ({place})"
        )

    def ends(self, name: str, repetitions: list[dict]) -> None:
        """repetitions: the counted ones of this contender so far."""
        self._turns[name].append(time.monotonic() - self._begun)
        self._news.append(f"{name} {seconds_text(repetitions[-1]['seconds'])}")

    def left_s(self) -> float | None:
        """Seconds of all turns to come, as those before took: of a contender its own, at another size by as much longer
        as the vector is; of one that had none yet the others' mean. None before the first turn has ended."""
        known = {name: seconds for name in self._turns if (seconds := self._turn_s(name)) is not None}
        if not known:
            return None
        usual = statistics.mean(known.values())
        turn_s = {name: known.get(name, usual) for name in self._turns}
        here = sum((self._repeat - len(turns)) * turn_s[name] for name, turns in self._turns.items())
        larger = sum(self._sizes[self._at + 1 :]) / self._sizes[self._at]
        return here + larger * self._repeat * sum(turn_s.values())

    def _turn_s(self, name: str) -> float | None:
        turns = self._turns[name]
        return statistics.mean(turns) if turns else self._expected.get(name)


class KeptReport:
    """The JSON file of a report that grows. `complete` in it says whether that is all that was to be measured.

    path: None to keep nothing.
    """

    def __init__(self, path: Path | None, report: dict):
        self._path, self._report, self._kept_at, self._complains = path, report, float("-inf"), True

    def keep(self) -> None:
        """Write what there is, if it is time. A disk that is full is said once, and is no reason to stop measuring."""
        if self._path is None or time.monotonic() - self._kept_at < KEEP_S:
            return
        try:
            write_json(self._path, self._report | {"complete": False})
        except UserError as error:
            if self._complains:
                say(f"warning: {error}; measuring goes on", on_stderr=True)
            self._complains = False
        self._kept_at = time.monotonic()

    def complete(self) -> None:
        """Write it all. UserError: it cannot be written."""
        if self._path is not None:
            write_json(self._path, self._report | {"complete": True})
