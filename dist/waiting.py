"""Wait for MPI without keeping the core busy: test, and sleep between tests. Sum numbers while waiting in this way."""

import math
import os
import time
from collections.abc import Callable

import numpy as np

# Linux adds up to 50 us of timer slack to each sleep (prctl(2)): a shorter first pause would not end earlier.
SHORTEST_PAUSE_S = 20e-6
LONGEST_PAUSE_S = 3e-4
POLLING_S = 100e-6  # longer than the first pause with its slack


class Pauses:
    """Sleeps that grow while nothing happens: a short wait ends at once, a long one uses no core."""

    def __init__(self):
        self.happened()

    def happened(self) -> None:
        self._next_s = SHORTEST_PAUSE_S

    def sleep(self) -> None:
        time.sleep(self._next_s)
        self._next_s = min(1.5 * self._next_s, LONGEST_PAUSE_S)


class Condition:
    """Something to wait for like an MPI request: `Test()` is `holds()`, which another rank makes true."""

    def __init__(self, holds: Callable[[], bool]):
        self.Test = holds


def wait(request) -> None:
    """Wait until `request.Test()` is true: an MPI request is complete, or a Condition holds."""
    pauses = Pauses()
    while not request.Test():
        pauses.sleep()


def wait_nearby(request, progress: Callable[[], object] = lambda: None) -> None:
    """Wait for a message that is due within microseconds: poll for a while before the first sleep.

    Between polls it yields the core, which two ranks may share. progress() advances other work that is under way.
    """
    if request.Test():
        return
    pauses = Pauses()
    until = time.perf_counter() + POLLING_S
    while not request.Test():
        progress()
        if time.perf_counter() < until:
            os.sched_yield()
        else:
            pauses.sleep()


def barrier(comm) -> None:
    wait(comm.Ibarrier())


def gather_everywhere(comm, *numbers: float) -> np.ndarray:
    """Return the numbers of every rank of comm, (ranks, numbers) float64. Collective."""
    gathered = np.empty((comm.size, len(numbers)))
    own = np.array(numbers, float)
    wait(comm.Iallgather(own, gathered))
    return gathered


def sum_everywhere(comm, *numbers: float) -> list[float]:
    """Return each number's sum over the ranks of comm. Collective.

    All ranks get the same bits: they gather the numbers and add them exactly (math.fsum), so the order does not matter.
    """
    return [math.fsum(column) for column in gather_everywhere(comm, *numbers).T]


class EarlySum:
    """Sums a number over the ranks of comm while a larger exchange is still under way.

    Each rank adds `parts` parts, and sends their sum with the last one. Between its last part and `result`, a rank must
    start no other collective on comm. All ranks get the same bits, as from sum_everywhere.
    """

    def __init__(self, comm, parts: int):
        self._comm = comm
        self._parts = parts
        self._gathered = np.empty(comm.size)
        self._own = []

    def add(self, part: float) -> None:
        self._own.append(part)
        if len(self._own) == self._parts:
            self._send()

    def result(self) -> float:
        """Wait for all ranks' parts, return their sum, and begin the next sum. Collective."""
        if self._parts == 0:  # this rank owns nothing, and no `add` has sent for it
            self._send()
        wait(self._request)
        self._own = []
        return math.fsum(self._gathered)

    def _send(self):
        self._sum = np.array([math.fsum(self._own)])
        self._request = self._comm.Iallgather(self._sum, self._gathered)
