"""Which steps of a long run are traced: all of its first ones, then ever fewer, and some that stood out.

So the traces of a week take as much as those of an hour: 256 steps at the start, then 224 more in each eightfold of
the steps so far. They are the same on all ranks, as no rank decides by anything that it alone knows.

A 124M model on 8 ranks makes a million steps in a week, and every one of them takes 9 kB a rank: 70 GB. By the rule
above 1,140 of them are kept, 10 MB a rank. A run that is taken up again (--resume) begins anew, with all of its steps.
"""

from collections import deque
from statistics import median

from traces.record.files import RunError

DENSE_STEPS = 256  # of the start, all of which are traced
APART = 8  # after each eightfold of them, traced steps lie eight times as far apart
NEIGHBOURS = 31  # earlier steps, whose median a step is compared with
STANDS_OUT = 1.5  # times that median
REGULAR_EACH = 10  # regular steps for each that stood out: medians over traced steps stay those of the run


def is_regular(number: int) -> bool:
    """Whether a start's step is traced however long it takes. number: counted from 1, from the start's first step."""
    apart = 1
    while number > DENSE_STEPS * apart:
        apart *= APART
    return number % apart == 0


def parse_steps(text: str) -> tuple[int, float]:
    """The first and last step that may be written. "on": all, and what comes before the first; "off": none."""
    if text == "on":
        return 0, float("inf")
    if text == "off":
        return 1, 0
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise RunError(f"--trace {text!r}: expected on, off or FROM:TO with 1 <= FROM <= TO, as in --trace 10:20")
    return int(first), int(last)


class TracedSteps:
    """What the text of --trace asks for, "on", "off" or "FROM:TO", of the steps of one start, which come in order."""

    def __init__(self, text: str):
        self._first, self._last = parse_steps(text)
        self._is_thinned, self._before_first = text == "on", None

    def __contains__(self, step: int) -> bool:
        """Whether the step may be written."""
        return self._first <= step <= self._last

    def keep(self, step: int) -> bool:
        """Whether it is written however long it takes. The first step of all that is asked for is the start's first."""
        if self._before_first is None:
            self._before_first = step - 1
        return not self._is_thinned or is_regular(step - self._before_first)


class SlowSteps:
    """Finds the steps that stand out from those before them, as many as the regular ones allow."""

    def __init__(self):
        self._before, self._number, self._room = deque(maxlen=NEIGHBOURS), 0, 0.0

    def is_kept(self, seconds: float) -> bool:
        """Whether the step is traced for its length alone. Called for every step, with the same seconds on all ranks.

        seconds: of the rank that took longest. Until there are enough earlier steps, none stands out.
        """
        self._number += 1
        regular, before = is_regular(self._number), list(self._before)
        self._before.append(seconds)
        self._room += regular / REGULAR_EACH
        if regular or self._room < 1 or len(before) < NEIGHBOURS or seconds < STANDS_OUT * median(before):
            return False
        self._room -= 1
        return True
