"""Choose the steps of a long run to trace: all first steps, then fewer and fewer, and some slow ones.

The first 256 steps are traced, and 224 more each time the number of steps grows eightfold. A 124M model on 8 ranks
makes a million steps in a week. All their traces would take 70 GB (9 kB a step and rank). By this rule 1,140 steps
are kept, 10 MB a rank. All ranks keep the same steps, because the rule uses no local knowledge. A resumed
run applies the rule from its first step again.
"""

from collections import deque
from statistics import median

from traces.record.files import RunError

DENSE_STEPS = 256  # the number of first steps that are all traced
APART = 8  # each time the number of steps grows by this factor, so does the distance of traced steps
NEIGHBOURS = 31  # a step is compared with the median of this many earlier ones
STANDS_OUT = 1.5  # ratio of a long step to that median
REGULAR_EACH = 10  # regular steps for each long one, so that medians over traced steps represent the run


def is_regular(number: int) -> bool:
    """Return whether a step is traced whatever its length. number: 1 for the first step of this start."""
    apart = 1
    while number > DENSE_STEPS * apart:
        apart *= APART
    return number % apart == 0


def parse_steps(text: str) -> tuple[int, float]:
    """Return the first and last step that may be written. "on": all, and phases before the first step; "off": none."""
    if text == "on":
        return 0, float("inf")
    if text == "off":
        return 1, 0
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise RunError(f"--trace {text!r}: expected on, off or FROM:TO with 1 <= FROM <= TO, as in --trace 10:20")
    return int(first), int(last)


class TracedSteps:
    """The steps that --trace asks for: "on", "off" or "FROM:TO". Steps of one start, which come in order."""

    def __init__(self, text: str):
        self._first, self._last = parse_steps(text)
        self._is_thinned = text == "on"
        self._before_first = None

    def __contains__(self, step: int) -> bool:
        """Return whether the step may be written."""
        return self._first <= step <= self._last

    def keep(self, step: int) -> bool:
        """Return whether the step is written whatever its length. Call first for the first step of the start."""
        if self._before_first is None:
            self._before_first = step - 1
        return not self._is_thinned or is_regular(step - self._before_first)


class SlowSteps:
    """Find steps that are longer than earlier ones, at most one for every REGULAR_EACH regular steps."""

    def __init__(self):
        self._before = deque(maxlen=NEIGHBOURS)
        self._number = 0
        self._room = 0.0

    def is_kept(self, seconds: float) -> bool:
        """Return whether a step is traced for its length alone. Call for every step, with equal seconds on all ranks.

        seconds: of the rank that took longest. Without enough earlier steps, none stands out.
        """
        self._number += 1
        regular = is_regular(self._number)
        before = list(self._before)
        self._before.append(seconds)
        self._room += regular / REGULAR_EACH
        if regular or self._room < 1 or len(before) < NEIGHBOURS or seconds < STANDS_OUT * median(before):
            return False
        self._room -= 1
        return True
