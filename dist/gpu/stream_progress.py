"""Exchanges under way on a stream of a GPU, in place of progress.py's: nobody on the host moves them on, or waits.

The stream of the exchanges may be one beside the stream that computes. Then events keep the two in order: an exchange
comes after all that was to be computed when it was begun, and what is to be computed after `finish` comes after it.
"""


class StreamProgress:
    """device: has `stream`, on which it computes, and `cupy`. stream: of the exchanges, that one or another."""

    def __init__(self, device, stream):
        self._computes, self._stream = device.stream, stream
        self._new_event = lambda: device.cupy.cuda.Event(disable_timing=True)

    def start(self, exchange):
        """Queue all of an exchange, with what it computes itself. Returns its end, to be given to `finish`."""
        self._stream.wait_event(self._mark(self._computes))
        with self._stream:
            for _ in exchange:
                pass
        return self._mark(self._stream)

    def finish(self, end=None) -> None:
        """What is queued to be computed from here on comes after that exchange, or all."""
        self._computes.wait_event(end or self._mark(self._stream))

    def poke(self) -> bool:
        """There is nothing to be moved on."""
        return False

    def _mark(self, stream):
        event = self._new_event()
        event.record(stream)
        return event
