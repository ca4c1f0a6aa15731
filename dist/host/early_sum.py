"""A number summed over all ranks while something larger is still under way."""

import math

import numpy as np

from dist.waiting import wait


class EarlySum:
    """The sum over the ranks of comm of what each adds in `parts` parts; it travels as soon as a rank has its last one.

    Between a rank's last part and its `result` it begins no other collective on comm. The same bits on all ranks: the
    ranks' sums are gathered, then added exactly.
    """

    def __init__(self, comm, parts: int):
        self._comm, self._parts = comm, parts
        self._gathered = np.empty(comm.size)
        self._begin()

    def add(self, part: float) -> None:
        self._own.append(part)
        if len(self._own) == self._parts:
            self._send()

    def result(self) -> float:
        """Return when all ranks have all their parts; the next sum begins. Collective."""
        if self._parts == 0:
            self._send()
        wait(self._request)
        self._begin()
        return math.fsum(self._gathered)

    def _begin(self):
        self._own, self._request = [], None

    def _send(self):
        self._sum = np.array([math.fsum(self._own)])
        self._request = self._comm.Iallgather(self._sum, self._gathered)
