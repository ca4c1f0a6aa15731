"""The double tree of dist/host/host_tree.py between GPUs: messages and additions queued on one stream.

Each tree of double_tree reduces half of a range to its root and broadcasts the sum, in pipelined pieces. In a stage
each rank sends and receives its pieces of both trees, up and down, as one group of messages, and then adds the pieces
from its children. The depth of an edge decides in which stage a piece crosses it. Both ranks of the edge use the same
stage, so no rank waits for a later stage of another, and there is no deadlock.
"""

from typing import NamedTuple

from dist.gpu.buffers import device_zeros
from dist.gpu.comm import DeviceComm
from dist.gpu.wire import new_device_wire
from dist.host.host_tree import children_of, double_tree
from dist.ranges import cut, cut_range, longest
from dist.wire import WireFormat

PIECE_BYTES = 4 << 20  # takes 80 us at 50 GB/s: several times the start-up time of a group of messages
MOST_CHILDREN = 2  # of a rank, in both trees together


class Place(NamedTuple):
    """A rank's place in a tree. depth: number of edges below the root."""

    parent: int | None
    children: list[int]
    depth: int


class DeviceTree:
    """All-reduces of whole ranges (exchange.py). Partial sums are rounded as in DeviceRing, final values by the root.
    Additions have the order of host_tree.py, so the sums have the same bits."""

    def __init__(self, comm: DeviceComm, ranges, wire_format: WireFormat):
        self._comm = comm
        trees = double_tree(comm.size)
        self._places = [
            Place(parents[comm.rank], children_of(comm.rank, parents), _depth(parents, comm.rank)) for parents in trees
        ]
        self._height = max(_depth(trees[0], rank) for rank in range(comm.size))  # both trees have the same shape
        most = longest(ranges) if comm.size > 1 else 0
        self._piece_length = min(PIECE_BYTES // wire_format.item_bytes, -(-most // 2))
        self._wire = new_device_wire(comm.device, wire_format, most, self._piece_length)
        self._landings = [device_zeros(comm.device, self._piece_length, self._wire.dtype) for _ in range(MOST_CHILDREN)]

    def allreduce(self, flat, errors=None) -> None:
        if self._comm.size > 1:
            halves = self._halves(len(flat))
            for stage in range(len(halves[0]) + 2 * self._height - 1):
                self._exchange(flat, errors, halves, stage - self._height)
            self._wire.arrived(flat, slice(0, len(flat)))

    def _halves(self, length: int) -> list[dict[int, slice]]:
        """Return each tree's numbered pieces of a range; both trees have equally many."""
        halves = cut(length, len(self._places))
        count = -(-longest(halves) // self._piece_length)
        return [{number: slice(*piece) for number, piece in enumerate(cut_range(*half, count))} for half in halves]

    def _exchange(self, flat, errors, halves, turn: int) -> None:
        """Run one stage: a rank passes piece turn + depth up, and piece turn - depth down.

        A piece first leaves the deepest ranks; it leaves the root one stage after it arrived there. Two ranks may
        exchange two messages, one per tree: they match because both ranks list the trees in the same order.
        """
        sends = []
        receives = []
        sums = []
        for (parent, children, depth), pieces in zip(self._places, halves, strict=True):
            if parent is not None and (part := pieces.get(turn + depth)):
                sends.append((self._wire.packed(flat, part, errors), parent))
            if parent is not None and (part := pieces.get(turn - depth + 1)):
                receives.append((self._wire.gathered(flat, part), parent))
            if children and (part := pieces.get(turn - depth)):
                final = self._wire.packed(flat, part, errors) if parent is None else self._wire.gathered(flat, part)
                sends += [(final, child) for child in children]
            if part := pieces.get(turn + depth + 1):
                for child in children:
                    landing = self._landings[len(sums)][: part.stop - part.start]
                    receives.append((landing, child))
                    sums.append((flat[part], landing))
        if sends or receives:
            self._comm.send_and_receive(sends, receives)
        for total, landing in sums:
            total += self._wire.unpacked(landing)


def _depth(parents: list[int | None], rank: int) -> int:
    return 0 if parents[rank] is None else 1 + _depth(parents, parents[rank])
