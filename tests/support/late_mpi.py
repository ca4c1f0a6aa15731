"""An MPI that delivers as late and in as odd an order as the standard allows, and says who did not wait.

MPI libraries are kind: small messages are copied at once and arrive in time, so a wait that is left out changes nothing
until the day when it does. Here a request is complete only after a number of tests drawn from a seed. Until then its
receive buffer holds NaN, and what came lies elsewhere. A send completes when it has been received, not before
(as of MPI_Issend), and its buffer must still hold what it held when the send began. So must a receive buffer its NaN.
"""

from random import Random

import numpy as np

POISON = 0xFF  # all bits set: a NaN in float32, float64 and bfloat16


class Late:
    """The requests of one rank, and how long each is held back: 0 to `most` unsuccessful tests."""

    def __init__(self, seed: int, most: int = 6):
        self.random, self.most = Random(seed), most
        self.open = {}  # {request: what it is, for a message}

    def receive(self, buffer, start, what: str) -> "LateRequest":
        """start(landing) begins the real one."""
        landing = np.empty_like(buffer)
        _bytes(buffer).fill(POISON)
        return self._request(what, start(landing), (), [(buffer, landing)])

    def send(self, buffer, start, what: str) -> "LateRequest":
        """start(copy) begins the real one."""
        copy = np.array(buffer)
        return self._request(what, start(copy), [(buffer, copy)], ())

    def collective(self, sent, received, start, what: str) -> "LateRequest":
        """start(copy, landing) begins the real one. received: None, or `sent` where the result replaces it."""
        copy, landing = np.array(sent), None if received is None else np.empty_like(received)
        if received is not None:
            _bytes(received).fill(POISON)
        sends = [] if sent is received else [(sent, copy)]
        receives = [] if received is None else [(received, landing)]
        request = self._request(what, start(copy, landing), sends, receives)
        request.held = copy  # which MPI reads until the request is complete
        return request

    def none(self, request, what: str) -> "LateRequest":
        """Of a request without buffers."""
        return self._request(what, request, (), ())

    def check_all_were_waited_for(self) -> None:
        assert not self.open, f"never waited for: {', '.join(self.open.values())}"

    def _request(self, what, *parts):
        request = LateRequest(self, self.random.randint(0, self.most), what, *parts)
        self.open[request] = what
        return request


class LateRequest:
    """sends: (the user's buffer, what it held); receives: (the user's buffer, where the data lands until the wait)."""

    def __init__(self, late: Late, tests: int, what: str, request, sends, receives):
        self._late, self._tests, self._what, self._request = late, tests, what, request
        self._sends, self._receives = sends, receives

    def Test(self) -> bool:
        if self not in self._late.open:
            return True
        self._tests -= 1
        if self._tests >= 0 or not self._request.Test():
            return False
        for buffer, copy in self._sends:
            assert _bytes(buffer).tobytes() == _bytes(copy).tobytes(), f"changed before its wait: {self._what}"
        for buffer, landing in self._receives:
            assert (_bytes(buffer) == POISON).all(), f"written to before its wait: {self._what}"
            buffer[...] = landing
        del self._late.open[self]
        return True


def _bytes(array) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)
