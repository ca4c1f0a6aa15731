"""Waiting that leaves the core to those who work: test, and sleep between two tests.

A rank blocked in an MPI call burns its core in every MPI library, also when other ranks need it.
"""

import math
import time
from collections.abc import Callable

import numpy as np

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 20e-6, 3e-4


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
    """Something to wait for that is no MPI request: `holds()` becomes true by another rank's doing."""

    def __init__(self, holds: Callable[[], bool]):
        self.Test = holds


def wait(request) -> None:
    """Return when `request.Test()` is true: an MPI request that is complete, or a Condition that holds."""
    pauses = Pauses()
    while not request.Test():
        pauses.sleep()


def barrier(comm) -> None:
    wait(comm.Ibarrier())


def gather_everywhere(comm, *numbers: float) -> np.ndarray:
    """(ranks, numbers) float64: what every rank of comm gave, on all of them."""
    gathered = np.empty((comm.size, len(numbers)))
    own = np.array(numbers, float)
    wait(comm.Iallgather(own, gathered))
    return gathered


def sum_everywhere(comm, *numbers: float) -> list[float]:
    """Each number's sum over the ranks of comm, with the same bits on all of them: gathered, then added exactly."""
    return [math.fsum(column) for column in gather_everywhere(comm, *numbers).T]
