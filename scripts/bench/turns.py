"""Measure contenders in turn, and summarize their times."""

import statistics
from collections.abc import Iterator
from typing import Any


def in_turns(contenders: dict[str, Any], turns: int) -> Iterator[tuple[int, str, Any]]:
    """Yield (turn, name, contender), each contender once per turn, so that a machine's drift affects all equally.

    A contender that the caller deletes from the dict takes no further turns.
    """
    for turn in range(turns):
        for name in list(contenders):
            yield turn, name, contenders[name]


def spread(seconds: list[float]) -> dict[str, float]:
    """Return the median, minimum and maximum."""
    return {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}


def step_times(seconds: list[float]) -> dict[str, float]:
    """Return the spread of a contender's step times, with the keys of a report."""
    found = spread(seconds)
    return {"step_s": found["median"], "min_s": found["min"], "max_s": found["max"]}
