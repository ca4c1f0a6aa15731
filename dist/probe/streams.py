"""Measure the rate that a link sustains: stream pieces from a node to its neighbour until the receiver has enough.

The first bytes may move faster than the link: into a shaper's token bucket, a switch's memory, a socket's buffers. So
the rate is measured in the second half of the stream, when these are full, and counts only if it has settled there. The
receiver ends the stream after a fixed time, so probing a slow link takes hardly longer than probing a fast one. A few
pieces are under way at once, each until its receiver has answered: this keeps the link busy and queues short.
"""

import time
from collections import deque
from dataclasses import dataclass

import numpy as np

from dist.mpi import MPI
from dist.waiting import Pauses, barrier

LEAST_PIECE_BYTES = 8 << 10
MOST_PIECE_BYTES = 1 << 20
PIECE_S = 1e-3  # a piece's time on the link: much longer than its software time, much shorter than the stream
PIECES_UNDER_WAY = 8  # half of them fill the link while the answers of the others come back
LEAST_COUNTED = 8  # least number of pieces in the counted time
SETTLED = 0.7  # least ratio of the rates in the two halves of the counted time
DATA, ANSWER, RESULT = range(3, 6)  # tags


@dataclass(frozen=True)
class Rate:
    """A measured rate. bytes_per_s: in the counted time; is_settled: whether it was the same throughout that time."""

    bytes_per_s: float
    is_settled: bool


def piece_bytes(rate: float) -> int:
    """Return the size of a piece in a stream of `rate` bytes/s."""
    return int(min(max(LEAST_PIECE_BYTES, rate * PIECE_S), MOST_PIECE_BYTES))


def stream(comm, to: int | None, source: int | None, seconds: float, size: int) -> tuple[Rate | None, Rate | None]:
    """Measure rates (out, in): a stream to the rank `to` in pieces of `size` bytes, and one from `source`. Collective.

    All ranks begin together. to, source: None to send or receive nothing; that rate is then None.
    """
    outgoing = None if to is None else _Outgoing(comm, to, size)
    incoming = None if source is None else _Incoming(comm, source, seconds)
    barrier(comm)
    pauses = Pauses()
    ends = [end for end in (outgoing, incoming) if end]
    while not all(end.is_done for end in ends):
        if sum(end.move() for end in ends):
            pauses.happened()
        else:
            pauses.sleep()
    received = incoming and sustained(incoming.arrivals, seconds / 2)
    return _tell(comm, to, source, received), received


def sustained(arrivals: list[tuple[float, int]], from_s: float) -> Rate:
    """Return the rate of the pieces, (time in s, bytes) each, that came later than `from_s` after the first.

    The first of these begins the counted time. There are at least LEAST_COUNTED of them.
    """
    times, sizes = (np.array(column, float) for column in zip(*arrivals, strict=True))
    counted = times >= times[0] + from_s
    times = times[counted]
    amounts = np.cumsum(sizes[counted])
    last = len(times) - 1
    middle = min(max(1, int(np.searchsorted(times, (times[0] + times[last]) / 2))), last - 1)
    halves = _rate(times, amounts, 0, middle), _rate(times, amounts, middle, last)
    return Rate(_rate(times, amounts, 0, last), min(halves) >= SETTLED * max(halves))


def _rate(times: np.ndarray, amounts: np.ndarray, start: int, stop: int) -> float:
    return float((amounts[stop] - amounts[start]) / max(times[stop] - times[start], 1e-9))


def _tell(comm, to: int | None, source: int | None, received: Rate | None) -> Rate | None:
    """Tell the sender the rate measured here, and return the rate that this rank's own receiver measured."""
    answer = comm.irecv(source=to, tag=RESULT) if to is not None else None
    told = comm.isend(received, source, tag=RESULT) if received else None
    result = answer.wait() if answer else None
    if told:
        told.wait()
    return result


class _Outgoing:
    """The sender's end. Its last PIECES_UNDER_WAY messages are empty: one for each receive that still waits."""

    def __init__(self, comm, to: int, size: int):
        self._comm = comm
        self._to = to
        self._piece = np.ones(size, np.uint8)
        self._under_way = deque()
        self._is_over = False

    @property
    def is_done(self) -> bool:
        return self._is_over and not self._under_way

    def move(self) -> bool:
        """Send what can be sent. Return whether anything happened."""
        happened = False
        while self._under_way and all(request.Test() for request in self._under_way[0][0]):
            _, wants_no_more = self._under_way.popleft()
            if wants_no_more[0] and not self._is_over:
                self._is_over = True
                ending = [self._comm.Isend(self._piece[:0], self._to, DATA) for _ in range(PIECES_UNDER_WAY)]
                self._under_way.append((ending, wants_no_more))
            happened = True
        while len(self._under_way) < PIECES_UNDER_WAY and not self._is_over:
            wants_no_more = np.zeros(1, np.uint8)
            requests = self._comm.Isend(self._piece, self._to, DATA), self._comm.Irecv(wants_no_more, self._to, ANSWER)
            self._under_way.append((requests, wants_no_more))
            happened = True
        return happened


class _Incoming:
    """The receiver's end. arrivals: (time.perf_counter(), bytes) of each piece."""

    def __init__(self, comm, source: int, seconds: float):
        self.arrivals = []
        self._comm = comm
        self._source = source
        self._seconds = seconds
        self._counted = 0
        self._status = MPI.Status()
        self._answers = deque()
        self._waiting = deque(self._receive(np.empty(MOST_PIECE_BYTES, np.uint8)) for _ in range(PIECES_UNDER_WAY))

    @property
    def is_done(self) -> bool:
        return not self._waiting and not self._answers

    def move(self) -> bool:
        """Receive and answer what has come. Return whether anything happened."""
        happened = False
        while self._answers and self._answers[0].Test():
            self._answers.popleft()
        while self._waiting and self._waiting[0][0].Test(self._status):
            _, buffer = self._waiting.popleft()
            if size := self._status.Get_count(MPI.BYTE):
                self.arrivals.append((time.perf_counter(), size))
                wants_no_more = np.array([self._has_enough()], np.uint8)
                self._answers.append(self._comm.Isend(wants_no_more, self._source, ANSWER))
                self._waiting.append(self._receive(buffer))
            happened = True
        return happened

    def _has_enough(self) -> bool:
        since_first = self.arrivals[-1][0] - self.arrivals[0][0]
        self._counted += since_first >= self._seconds / 2
        return since_first >= self._seconds and self._counted >= LEAST_COUNTED

    def _receive(self, buffer: np.ndarray):
        return self._comm.Irecv(buffer, self._source, DATA), buffer
