"""Exchanges by MPI's own rooted collectives, many under way at once: each rank is the root of a slice.

    reduce-scatter: for each rank r: Ireduce(slice r) to r      all-gather: for each rank r: Ibcast(slice r) from r

A call saturates the port of its root's node, so calls with other roots must run at the same time. Slices are cut by
nodes, so each node's port carries equally many bytes as root. Calls begin with the first rank of every node as root,
then the second, so the calls under way have roots on all nodes. They advance only while this process is inside MPI: a
test of one request advances all.
"""

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

from dist.mpi import MPI
from dist.progress_engine import ProgressEngine
from dist.ranges import cut_by_node, cut_range, local_ranks, longest
from dist.waiting import Condition
from dist.wire import WireFormat

# A library runs the steps of a call one after another. Slices are cut into pieces, to have several steps in flight. A
# piece is longer than a segment of our own messages, because each step waits for the next test of its request.
PIECE_SEGMENTS = 4
WINDOW = 64  # calls in flight: the library holds a buffer for each


class RootedExchange:
    """Exchanges among the ranks of comm that add with `operation`, an MPI.Op. Collective.

    placement: the node of each rank. ranges: all that will be exchanged; owners and calls are determined once, for all
    steps.
    """

    errors = None

    def __init__(self, comm, ranges, wire_format: WireFormat, placement: list[int], operation):
        self._comm = comm.Dup()
        self._operation = operation
        self._wire = wire_format.new(max(stop for _, stop in ranges))
        self.is_lossy = wire_format.is_lossy
        length = max(1, PIECE_SEGMENTS * wire_format.segment_bytes // wire_format.item_bytes)
        self._own = {part: cut_by_node(placement, *part)[comm.rank] for part in ranges}
        self._pieces = {part: pieces_of(placement, *part, length) for part in ranges}
        self.engine = ProgressEngine(WINDOW)
        self._calls = CallsTogether(WINDOW)

    def own_part(self, start: int, stop: int) -> tuple[int, int]:
        return self._own[start, stop]

    def reduce_scatter(self, vector, start: int, stop: int) -> Iterator:
        sent = self._wire.packed(vector, start, stop)
        yield from self._for_each_piece(self._reduce, sent, start, stop)
        self._wire.arrived(vector, *self.own_part(start, stop))

    def all_gather(self, vector, start: int, stop: int) -> Iterator:
        self._wire.rounded(vector, *self.own_part(start, stop))
        shared = self._wire.gathered(vector, start, stop)
        yield from self._for_each_piece(self._comm.Ibcast, shared, start, stop)
        self._wire.arrived(vector, start, stop)

    def _reduce(self, piece, root: int):
        if root == self._comm.rank:
            return self._comm.Ireduce(MPI.IN_PLACE, piece, self._operation, root)
        return self._comm.Ireduce(piece, None, self._operation, root)

    def _for_each_piece(self, begin: Callable, vector, start: int, stop: int) -> Iterator:
        """Queue begin(piece, root) for each piece, behind earlier ranges. vector: the values of this range only."""
        first = self._calls.count
        for root, (low, high) in self._pieces[start, stop]:
            self._calls.queue(partial(begin, vector[low - start : high - start], root))
        for count in range(first + 1, self._calls.count + 1):  # one by one, so the engine sees each end
            yield Condition(partial(self._calls.are_done, count))


def pieces_of(placement: list[int], start: int, stop: int, length: int) -> list[tuple[int, tuple[int, int]]]:
    """Return (root, bounds) in the order of the calls: every root's first piece, then every root's second, and so on.

    Roots alternate between nodes: the first rank of each node, then the second of each. length: of a piece, at most.
    """
    slices = cut_by_node(placement, start, stop)
    local = local_ranks(placement)
    roots = sorted(range(len(placement)), key=lambda rank: (local[rank], placement[rank]))
    count = max(1, -(-longest(slices) // length))
    pieces = [cut_range(*bounds, count) for bounds in slices]
    return [(root, pieces[root][turn]) for turn in range(count) for root in roots]


class CallsTogether:
    """Queue of nonblocking collectives. They begin in order, each when fewer than `most` are under way."""

    def __init__(self, most: int):
        self.count = 0  # calls queued so far
        self._most = most
        self._queue = deque()
        self._under_way = deque()
        self._done = 0

    def queue(self, begin: Callable) -> None:
        """Queue a call. begin() returns its request."""
        self._queue.append(begin)
        self.count += 1

    def are_done(self, count: int) -> bool:
        """Return whether the first `count` calls are complete; begin queued calls meanwhile."""
        while self._under_way and self._under_way[0].Test():
            self._under_way.popleft()
            self._done += 1
        while self._queue and len(self._under_way) < self._most:
            begin = self._queue.popleft()
            self._under_way.append(begin())
        return self._done >= count
