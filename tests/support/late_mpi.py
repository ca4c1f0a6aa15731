"""An MPI that delivers as late and in as odd an order as the standard allows, and says who did not wait.

MPI libraries are kind: small messages are copied at once and arrive in time, so a wait that is left out changes nothing
until the day when it does. Here a request is complete only after a number of tests drawn from a seed. Until then its
receive buffer holds NaN, and what came lies elsewhere. A send completes when it has been received, not before
(MPI_Issend), and its buffer must still hold what it held when the send began. So must a receive buffer its NaN.
"""

from random import Random

import numpy as np

from dist.mpi import MPI

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

    def Wait(self) -> bool:
        self._tests = 0
        self._request.Wait()
        return self.Test()


def late_comm(comm, late: Late):
    """The ranks of comm, with a communicator whose nonblocking calls are late. Collective."""

    class LateComm(MPI.Intracomm):
        """What is duplicated from it is of the same class: mpi4py sees to that."""

        def Split(self, color=0, key=0):
            return LateComm(super().Split(color, key))

        def Isend(self, buffer, dest, tag=0):
            start = super().Issend
            return late.send(buffer, lambda copy: start(copy, dest, tag), f"send to {dest}, tag {tag}")

        def Irecv(self, buffer, source, tag=0):
            start = super().Irecv
            return late.receive(
                buffer, lambda landing: start(landing, source, tag), f"receive from {source}, tag {tag}"
            )

        def Iallgather(self, sent, received):
            return late.collective(sent, received, super().Iallgather, "Iallgather")

        def Ireduce(self, sent, received, op=MPI.SUM, root=0):
            own, start = received if sent is MPI.IN_PLACE else sent, super().Ireduce
            return late.collective(own, received, lambda copy, landing: start(copy, landing, op, root), "Ireduce")

        def Ibcast(self, buffer, root=0):
            hold, start = late.send if self.rank == root else late.receive, super().Ibcast
            return hold(buffer, lambda held: start(held, root), f"Ibcast from {root}")

        def Ibarrier(self):
            return late.none(super().Ibarrier(), "Ibarrier")

        def __getattribute__(self, name):
            """Any other nonblocking call would not be late: it has to be written here first."""
            assert not name.startswith("I") or name in vars(LateComm) or name.startswith("Is_"), f"{name} is not late"
            return super().__getattribute__(name)

    return LateComm(comm).Dup()


def _bytes(array) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)
