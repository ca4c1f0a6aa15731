"""Nonblocking collectives of one communicator, many under way at once.

All ranks must begin a communicator's collectives in one order. So the calls stand in one queue, and each begins when
fewer than `most` are under way: the library holds a buffer for each.
"""

from collections import deque
from collections.abc import Callable
from time import perf_counter_ns

LOOK_NS = 2_000_000  # between two tests of all calls: one takes 0.2 us under MPICH, 1 us under Open MPI


class CallsTogether:
    """Queue of calls. notice(name, bytes, root), if given, hears each start; its result's `ended()`, each end."""

    def __init__(self, most: int, notice: Callable | None = None):
        self._most, self._notice = most, notice
        self._queue, self._under_way, self._done, self._looked_at = deque(), deque(), 0, 0
        self.count = 0  # calls queued so far

    def queue(self, begin: Callable, name: str, size: int, root: int) -> None:
        """Queue a call that moves `size` bytes to or from `root`; begin() returns its request."""
        self._queue.append((begin, name, size, root))
        self.count += 1

    def are_done(self, count: int) -> bool:
        """Return whether the first `count` calls are complete; start others meanwhile."""
        while self._under_way and self._under_way[0].Test():
            self._under_way.popleft()
            self._done += 1
        while self._queue and len(self._under_way) < self._most:
            self._under_way.append(self._begun(*self._queue.popleft()))
        if self._notice and perf_counter_ns() - self._looked_at >= LOOK_NS:
            self._look()
        return self._done >= count

    def _begun(self, begin: Callable, *facts):
        if self._notice is None:
            return begin()
        noticed = self._notice(*facts)  # before the call, which may already do a part of its work
        return _Noticed(begin(), noticed)

    def _look(self) -> None:
        """Test all calls, also those behind one that has not ended."""
        for call in self._under_way:
            call.Test()
        self._looked_at = perf_counter_ns()


class _Noticed:
    """A request that reports its end, once."""

    def __init__(self, request, noticed):
        self._request, self._noticed = request, noticed

    def Test(self) -> bool:
        if self._noticed is not None and self._request.Test():
            self._noticed.ended()
            self._noticed = None
        return self._noticed is None
