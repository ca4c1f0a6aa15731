"""Progress of exchanges: generators that yield what they wait for.

An exchange yields anything with Test(): an MPI request, or a Condition; never None. So an algorithm is written once,
and runs after backward or between its kernels. All ranks start their exchanges in the same order.
"""

from collections import deque
from collections.abc import Callable, Iterator
from functools import wraps
from types import SimpleNamespace

from dist.waiting import Condition, Pauses


class ProgressEngine:
    """Advances the exchanges that were started. At most `in_flight` are under way; the others are queued.

    While one exchange waits for a message, others use the port. Each holds buffers for the segments that it receives.
    """

    def __init__(self, in_flight: int = 4):
        self._in_flight = in_flight
        self._queue: deque[Iterator] = deque()
        self._live: dict[Iterator, object] = {}  # {exchange: what it waits for}, in the order in which they started

    def start(self, exchange: Iterator) -> Iterator:
        """Start an exchange, and return it for `finish`."""
        self._queue.append(exchange)
        self.progress()
        return exchange

    def progress(self) -> bool:
        """Advance all exchanges as far as possible, without waiting. Return whether anything is still under way."""
        while self._move():
            pass
        return bool(self._live)

    def finish(self, exchange: Iterator | None = None) -> None:
        """Wait until all exchanges have ended, or the given one; the others advance meanwhile."""

        def is_finished():
            unfinished = [*self._queue, *self._live]
            return not unfinished if exchange is None else exchange not in unfinished

        self.wait(Condition(is_finished))

    def wait(self, request) -> None:
        """Wait until `request.Test()` is true, as `waiting.wait` does; exchanges advance meanwhile."""
        pauses = Pauses()
        while not request.Test():
            if self._move():
                pauses.happened()
            else:
                pauses.sleep()

    def _move(self) -> bool:
        """Advance each exchange as far as it goes. Return whether any began or advanced."""
        moved = False
        while self._queue and len(self._live) < self._in_flight:
            exchange = self._queue.popleft()
            self._live[exchange] = next(exchange, None)
            moved = True
        for exchange, request in list(self._live.items()):
            while request is not None and request.Test():
                request = next(exchange, None)
                moved = True
            self._live[exchange] = request
        self._live = {exchange: request for exchange, request in self._live.items() if request is not None}
        return moved


def progressing(functions: SimpleNamespace, progress: Callable[[], object]) -> SimpleNamespace:
    """Wrap the functions so that each calls `progress` afterwards: exchanges then advance between kernels.

    Members that are not callable, such as the device, stay as they are.
    """

    def followed(function):
        @wraps(function)
        def call(*arguments, **options):
            result = function(*arguments, **options)
            progress()
            return result

        return call

    members = vars(functions).items()
    return SimpleNamespace(**{name: followed(member) if callable(member) else member for name, member in members})
