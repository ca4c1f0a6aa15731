"""CUDA's streams and events on a CPU: what is queued is done late, in the order that CUDA promises and in no other.

Each stream is a queue. How much of it is done when is a choice (`lag`), so that a wait that is missing shows: what was
to be waited for has then not happened, or too soon.
"""

import weakref
from collections import deque

NOT_READY = 600
LAGS = {
    "copies": lambda stream, is_copy: is_copy,  # kernels run when they are launched, copies when they are waited for
    "other streams": lambda stream, is_copy: stream.number > 0,  # all but the first, the one that computes
    "all but copies in": lambda stream, is_copy: stream.number in (0, 1),
    "everything": lambda stream, is_copy: True,
    "first stream": lambda stream, is_copy: stream.number == 0,
}


class Stream:
    streams, lag = [], "copies"
    current, entered = None, []

    def __init__(self, non_blocking=False):
        self.number, self.ptr = len(Stream.streams), 5 + len(Stream.streams)
        self.queue, self.queued, self.done = deque(), 0, 0
        Stream.streams.append(self)

    @classmethod
    def reset(cls, lag):
        cls.streams, cls.lag = [], lag
        cls.current = cls()
        cls.entered = [cls.current]
        cls.streams.clear()  # the default stream has no number

    def add(self, work, is_copy=False):
        self.queue.append(work)
        self.queued += 1
        if not LAGS[Stream.lag](self, is_copy):
            self.run()

    def run(self, position=None):
        """Do what is queued, up to a position in the count of all that ever was."""
        while self.queue and (position is None or self.done < position):
            self.queue.popleft()()
            self.done += 1

    def synchronize(self):
        self.run()

    def use(self):
        """As CuPy's: forgotten when the next `with` ends, which goes back to the one that was entered before."""
        Stream.current = self
        return self

    def __enter__(self):
        Stream.entered.append(self)
        return self.use()

    def __exit__(self, *exception):
        Stream.entered.pop()
        Stream.current = Stream.entered[-1]

    def wait_event(self, event):
        other, position = event.stream, event.position
        self.add(lambda: other is None or other.run(position))


class Event:
    events = weakref.WeakValueDictionary()  # noqa: RUF012

    def __init__(self, block=False, disable_timing=False):
        self.stream, self.position = None, 0
        self.ptr = id(self)
        Event.events[self.ptr] = self

    def record(self, stream=None):
        self.stream = stream or Stream.current
        self.position = self.stream.queued

    def synchronize(self):
        if self.stream is not None:
            self.stream.run(self.position)

    @property
    def done(self):
        return event_query(self.ptr) == 0


def event_query(ptr):
    """The GPU goes on by one thing while the host looks."""
    event = Event.events[ptr]
    if event.stream is None or event.stream.done >= event.position:
        return 0
    event.stream.run(event.stream.done + 1)
    return NOT_READY


def stream_at(ptr):
    """The stream of this address; None for one that is not ours."""
    return next((stream for stream in Stream.streams if stream.ptr == ptr), None)


Stream.reset("copies")
