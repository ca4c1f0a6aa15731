"""Exchanges by MPI's own rooted collectives, all under way at once: each rank is the root of a slice.

    reduce-scatter: for each rank r: Ireduce(slice r) to r      all-gather: for each rank r: Ibcast(slice r) from r

A call fills the port of its root's node, so it must not wait for the others. Slices are cut by nodes, so each node's
port carries the same bytes as root. Calls begin with the first rank of every node, then the second ones, so the roots
of the calls under way are on all nodes.

A non-blocking collective advances only while this process is inside MPI. `ProgressEngine.progress` tests a request,
which advances all that are under way.
"""

from collections.abc import Callable, Iterator
from functools import partial

from dist.host.together import CallsTogether
from dist.mpi import MPI
from dist.progress_engine import ProgressEngine
from dist.ranges import cut_by_node, cut_range, local_ranks, longest
from dist.waiting import Condition
from dist.wire import WireFormat

# A library's call makes its steps one after another, so slices are cut into pieces: several steps are then under way.
# A piece is longer than a segment of our own messages, because each step waits for the next test of its request.
PIECE_SEGMENTS = 4
WINDOW = 64  # calls under way: the library holds a buffer for each


class RootedExchange:
    """Exchanges among the ranks of comm that add with `operation`, an MPI.Op. Collective.

    placement: the node of each rank. ranges: all that will be exchanged; owners and calls are found once, for all
    steps. on_call: as CallsTogether's notice.
    """

    errors = None

    def __init__(self, comm, ranges, wire_format: WireFormat, placement: list[int], operation, on_call=None):
        self._comm, self._operation = comm.Dup(), operation
        self._wire, self.is_lossy = wire_format.new(max(stop for _, stop in ranges)), wire_format.is_lossy
        length = max(1, PIECE_SEGMENTS * wire_format.segment_bytes // wire_format.item_bytes)
        self._own = {part: cut_by_node(placement, *part)[comm.rank] for part in ranges}
        self._pieces = {part: pieces_of(placement, *part, length) for part in ranges}
        self.engine = ProgressEngine(WINDOW)
        self._calls = CallsTogether(WINDOW, on_call)

    def own_part(self, start: int, stop: int) -> tuple[int, int]:
        return self._own[start, stop]

    def reduce_scatter(self, vector, start: int, stop: int) -> Iterator:
        sent = self._wire.packed(vector, start, stop)
        yield from self._for_each_piece("reduce", self._reduce, sent, start, stop)
        self._wire.arrived(vector, *self.own_part(start, stop))

    def all_gather(self, vector, start: int, stop: int) -> Iterator:
        self._wire.rounded(vector, *self.own_part(start, stop))
        shared = self._wire.gathered(vector, start, stop)
        yield from self._for_each_piece("bcast", self._comm.Ibcast, shared, start, stop)
        self._wire.arrived(vector, start, stop)

    def _reduce(self, piece, root: int):
        if root == self._comm.rank:
            return self._comm.Ireduce(MPI.IN_PLACE, piece, self._operation, root)
        return self._comm.Ireduce(piece, None, self._operation, root)

    def _for_each_piece(self, name: str, begin: Callable, vector, start: int, stop: int) -> Iterator:
        """Queue begin(piece, root) for each piece, behind earlier ranges. vector: this range only."""
        first = self._calls.count
        for root, (low, high) in self._pieces[start, stop]:
            piece = vector[low - start : high - start]
            self._calls.queue(partial(begin, piece, root), name, piece.nbytes, root)
        for count in range(first + 1, self._calls.count + 1):  # one by one, so the engine sees each end
            yield Condition(partial(self._calls.are_done, count))


def pieces_of(placement: list[int], start: int, stop: int, length: int) -> list[tuple[int, tuple[int, int]]]:
    """Return (root, bounds) in the order of the calls: every root's first piece, then every second one.

    Roots go round the nodes: the first rank of each, then the second ones. length: the most elements of a piece.
    """
    slices = cut_by_node(placement, start, stop)
    local = local_ranks(placement)
    roots = sorted(range(len(placement)), key=lambda rank: (local[rank], placement[rank]))
    count = max(1, -(-longest(slices) // length))
    pieces = [cut_range(*bounds, count) for bounds in slices]
    return [(root, pieces[root][turn]) for turn in range(count) for root in roots]
