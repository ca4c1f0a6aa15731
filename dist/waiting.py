"""Waiting that leaves the core to those who work: test, and sleep between two tests. Sums of numbers, so waited for.

A rank blocked in an MPI call burns its core in every MPI library, also when other ranks need it.
"""

import math
import os
import time
from collections.abc import Callable

import numpy as np

# Linux adds up to 50 us of timer slack to each (prctl(2)): a shorter pause than the first would not end earlier.
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 20e-6, 3e-4
POLLING_S = 100e-6  # twice what the first pause and its slack take


def nothing() -> None:
    """What is moved on while a rank waits, where nothing else is under way."""


class Pauses:
    """Sleeps of growing length while nothing happens: what is near is met at once, what is far off costs no core."""

    def __init__(self):
        self.happened()

    def happened(self) -> None:
        self._next_s = SHORTEST_PAUSE_S

    def sleep(self) -> None:
        time.sleep(self._next_s)
        self._next_s = min(1.5 * self._next_s, LONGEST_PAUSE_S)


class Condition:
    """Something to wait for that is no MPI request: `holds()` becomes true by what another rank does."""

    def __init__(self, holds: Callable[[], bool]):
        self.Test = holds


def wait(request) -> None:
    """Return when `request.Test()` is true: an MPI request that is complete, or a Condition that holds."""
    pauses = Pauses()
    while not request.Test():
        pauses.sleep()


def wait_nearby(request, poke: Callable[[], object] = nothing) -> None:
    """As wait, for what is likely to be there within microseconds: it polls for a while before it sleeps.

    Between two polls the core is left to whoever needs it: two ranks may share one. poke() moves on what else is under
    way.
    """
    if request.Test():
        return
    pauses, until = Pauses(), time.perf_counter() + POLLING_S
    while not request.Test():
        poke()
        if time.perf_counter() < until:
            os.sched_yield()
        else:
            pauses.sleep()


def barrier(comm) -> None:
    wait(comm.Ibarrier())


def gather_everywhere(comm, *numbers: float) -> np.ndarray:
    """(ranks, numbers) float64: what every rank of comm gave, on all of them. Collective."""
    gathered = np.empty((comm.size, len(numbers)))
    own = np.array(numbers, float)
    wait(comm.Iallgather(own, gathered))
    return gathered


def sum_everywhere(comm, *numbers: float) -> list[float]:
    """Each number's sum over the ranks of comm. Collective.

    All ranks get the same bits: they gather the numbers and add them exactly (math.fsum), in which no order matters.
    """
    return [math.fsum(column) for column in gather_everywhere(comm, *numbers).T]


class EarlySum:
    """A number summed over the ranks of comm while something larger is still under way.

    Each rank adds it in `parts` parts; the rank's sum travels as soon as it has the last one. Between its last part and
    its `result`, a rank begins no other collective on comm. All ranks get the same bits, as from sum_everywhere.
    """

    def __init__(self, comm, parts: int):
        self._comm, self._parts = comm, parts
        self._gathered, self._own = np.empty(comm.size), []

    def add(self, part: float) -> None:
        self._own.append(part)
        if len(self._own) == self._parts:
            self._send()

    def result(self) -> float:
        """Return when all ranks have all their parts; the next sum begins. Collective."""
        if self._parts == 0:  # this rank owns nothing, and no `add` has sent for it
            self._send()
        wait(self._request)
        self._own = []
        return math.fsum(self._gathered)

    def _send(self):
        self._sum = np.array([math.fsum(self._own)])
        self._request = self._comm.Iallgather(self._sum, self._gathered)
