"""Exchanges under way: generators that yield what they wait for, moved on between pieces of compute or to the end.

So an algorithm is written once, and runs after backward or during it. An exchange yields anything with Test(): an MPI
request, or a Condition. All ranks start their exchanges in the same order.
"""

from collections import deque
from collections.abc import Callable, Iterator
from functools import wraps
from types import SimpleNamespace

from dist.waiting import Condition, Pauses


class Progress:
    """Exchanges that were started and have not ended. At most `in_flight` of them are under way; the others queue."""

    def __init__(self, in_flight: int = 4):
        self._in_flight = in_flight
        self._queue: deque[Iterator] = deque()
        self._live: dict[Iterator, object] = {}  # {exchange: what it waits for}, in the order of their starts

    def start(self, exchange: Iterator) -> Iterator:
        """Returns it, to be given to `finish`."""
        self._queue.append(exchange)
        self.poke()
        return exchange

    def poke(self) -> bool:
        """Move on whatever can move, without waiting. True while something is under way."""
        while self._move():
            pass
        return bool(self._live)

    def finish(self, exchange: Iterator | None = None) -> None:
        """Return when all have ended, or this one; the others move on meanwhile."""
        self.wait(Condition(lambda: not self._is_under_way(exchange)))

    def wait(self, request) -> None:
        """Return when `request.Test()` is true, as `waiting.wait` does; what is under way moves on meanwhile."""
        pauses = Pauses()
        while not request.Test():
            if self._move():
                pauses.happened()
            else:
                pauses.sleep()

    def _is_under_way(self, exchange: Iterator | None) -> bool:
        under_way = [*self._queue, *self._live]
        return bool(under_way) if exchange is None else exchange in under_way

    def _move(self) -> bool:
        """Move each exchange on as far as it goes; False if none could."""
        while self._queue and len(self._live) < self._in_flight:
            exchange = self._queue.popleft()
            request = next(exchange, None)
            if request is not None:
                self._live[exchange] = request
        moved = False
        for exchange, request in list(self._live.items()):
            while request is not None and request.Test():
                request, moved = next(exchange, None), True
            self._live[exchange] = request
        self._live = {exchange: request for exchange, request in self._live.items() if request is not None}
        return moved


def poking(functions: SimpleNamespace, poke: Callable[[], object]) -> SimpleNamespace:
    """The same functions, each followed by a poke, so that exchanges move on between pieces of compute.

    A member that is no function (the device they run on) stays as it is.
    """

    def followed(function):
        @wraps(function)
        def call(*arguments, **options):
            result = function(*arguments, **options)
            poke()
            return result

        return call

    members = vars(functions).items()
    return SimpleNamespace(**{name: followed(member) if callable(member) else member for name, member in members})
