"""The messages of one step's exchange, which give the exact bytes into and out of every rank and node.

A strategy declares its message schedule as a function of a Setting (`messages` of its traits). The functions here build
such schedules: rings and trees of point-to-point messages, and calls of MPI's collectives, whose messages depend on the
algorithm that the library picks (mpi_choices.py). Messages are (stages, names of the MPI library's algorithms).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from dist.cost.memory import VECTOR_BYTES
from dist.cost.mpi_algorithms import MpiCall
from dist.cost.mpi_choices import resolve
from dist.cost.stages import Stage, barrier, leaders_of, stage
from dist.host.host_tree import double_tree
from dist.host.rooted import PIECE_SEGMENTS, WINDOW
from dist.probe.links import LEAST_SEGMENT_BYTES
from dist.ranges import cut, cut_by_node
from dist.wire import WIRE_BYTES

# Rooted calls: up to MOST_ROOTS roots are modelled one by one. Of more, FEW_ROOTS evenly spaced ones represent all.
MOST_ROOTS = 64
FEW_ROOTS = 16

Messages = tuple[list[Stage], list[str]]
# Between the halves of an exchange with a sharded update, all ranks sum the norm of the gradient.
NORM: Messages = ([barrier()], [])


@dataclass(frozen=True)
class Setting:
    """The vector that is exchanged, and the ranks that exchange it.

    placement: node of each rank, (ranks,); nodes are numbered from 0, none is empty. elements: length of the vector.
    item: bytes of one element on the wire. library: one of mpi_choices.LIBRARIES. ranges: elements of each range, in
    order, if a strategy exchanges range by range; () if unknown. micro_steps: microbatches per step. own_operation:
    whether MPI's collectives add with --op own; always true if items are not float32. matrices: (start, rows, columns)
    of each in the vector, None if unknown. low_rank: rank of the factors that stand for a matrix.
    """

    placement: np.ndarray
    elements: int
    item: float = VECTOR_BYTES
    library: str = "mpich"
    ranges: tuple[int, ...] = ()
    micro_steps: int = 1
    own_operation: bool = False
    matrices: tuple[tuple[int, int, int], ...] | None = None
    low_rank: int = 4

    @property
    def ranks(self) -> np.ndarray:
        return np.arange(len(self.placement))

    @property
    def vector(self) -> int:
        """Bytes of the whole vector."""
        return math.ceil(self.item * self.elements)

    @property
    def padded(self) -> int:
        """Bytes of the vector, padded so that all ranks get equal shares."""
        return math.ceil(self.item * (-(-self.elements // len(self.placement)) * len(self.placement)))

    def blocks(self, parts: int, elements: int | None = None) -> np.ndarray:
        """Return the bytes of each part of the vector, or of `elements` elements, cut as the strategies cut it."""
        bounds = cut(self.elements if elements is None else elements, parts)
        return np.array([math.ceil(self.item * (stop - start)) for start, stop in bounds], np.int64)

    def call(self, collective: str, size: int, root: int = 0) -> Messages:
        """Return the messages of one MPI collective of `size` bytes. UnknownChoice if its algorithm is unknown."""
        built_in = self.item == VECTOR_BYTES and not self.own_operation
        return resolve(MpiCall(self.library, collective, self.ranks, self.placement, size, root, built_in))


def in_turn(*calls: Messages) -> Messages:
    """Concatenate the stages of calls, and the names of their algorithms without duplicates."""
    stages = [stage for stages, _ in calls for stage in stages]
    return stages, list(dict.fromkeys(name for _, names in calls for name in names))


def rooted_calls(setting: Setting, collective: str) -> list[Messages]:
    """Return the messages of one rooted collective per rank, in which this rank is the root of its slice."""
    slices = setting.blocks(len(setting.placement))
    calls = []
    for root, alike in roots_of(len(slices)):
        stages, names = setting.call(collective, int(slices[root]), root)
        calls.append(([replace(one, repeat=one.repeat * alike) for one in stages], names))
    return calls


def rooted_calls_together(setting: Setting, collective: str) -> Messages:
    """Return one stage for rooted calls on pieces of the slices, WINDOW calls under way (dist/host/rooted.py)."""
    slices = [stop - start for start, stop in cut_by_node(setting.placement.tolist(), 0, setting.elements)]
    piece = PIECE_SEGMENTS * LEAST_SEGMENT_BYTES // setting.item  # elements, with the segments of slow links
    pieces = max(1, -(-max(slices) // piece))
    messages = []
    names = []
    steps = 0
    added = 0
    for root, alike in roots_of(len(slices)):
        stages, algorithms = setting.call(collective, setting.item * slices[root] // pieces, root)
        messages += [(one.source, one.destination, alike * pieces * one.repeat * one.size) for one in stages]
        names += algorithms
        steps = max(steps, sum(one.repeat for one in stages))
        added += alike * pieces * sum(one.added for one in stages)
    sources, destinations, sizes = (np.concatenate(part) for part in zip(*messages, strict=True))
    turns = -(-pieces * len(slices) // WINDOW)
    added_by_rank = added // len(slices)
    together = stage(
        sources, destinations, sizes, steps=steps * turns, added_meanwhile=added_by_rank, all_together=True
    )
    return [together], list(dict.fromkeys(names))


def roots_of(ranks: int) -> list[tuple[int, int]]:
    """Return (root, number of roots that it represents) of rooted calls, one for each rank."""
    stretches = cut(ranks, ranks if ranks <= MOST_ROOTS else FEW_ROOTS)
    return [((start + stop - 1) // 2, stop - start) for start, stop in stretches]


def ring_reduce_scatter(members: np.ndarray, blocks: np.ndarray) -> list[Stage]:
    """Reduce-scatter around a ring: each member sends every block but its own, which arrives last, as the sum of all.

    Blocks travel in segments, so a member adds a segment while the next one arrives.
    """
    sent = blocks.sum() - blocks
    steps = max(len(members) - 1, 1)
    return [stage(members, np.roll(members, -1), sent, steps=steps, added_meanwhile=int(sent.max()), all_together=True)]


def ring_all_gather(members: np.ndarray, blocks: np.ndarray) -> list[Stage]:
    """Gather around a ring: each member passes on every block but its right neighbour's, in segments."""
    sent = blocks.sum() - np.roll(blocks, -1)
    return [stage(members, np.roll(members, -1), sent, steps=max(len(members) - 1, 1), all_together=True)]


def ring_of(members: np.ndarray, blocks: np.ndarray) -> Messages:
    """Return a ring reduce-scatter and all-gather of these ranks. blocks: bytes of each member's part, (members,)."""
    return ring_reduce_scatter(members, blocks) + ring_all_gather(members, blocks), []


def sums_of_nodes(setting: Setting) -> Messages:
    """Sum the vector in each node's shared memory, then between the leaders: directly in int8, else around a ring."""
    leaders = leaders_of(setting.placement)
    blocks = setting.blocks(len(leaders))
    if setting.item == WIRE_BYTES["int8"]:
        return direct_exchange(leaders, blocks), []
    return ring_of(leaders, blocks)


def direct_exchange(members: np.ndarray, blocks: np.ndarray) -> list[Stage]:
    """Let each member send every block to its owner, and each owner the block's sum to all. blocks: bytes, (members,).

    Blocks travel in segments, so an owner adds a segment while the next ones arrive.
    """
    source, owner = (each.ravel() for each in np.meshgrid(np.arange(len(members)), np.arange(len(members))))
    added = (len(members) - 1) * int(blocks.max())
    to_owners = stage(members[source], members[owner], blocks[owner], added_meanwhile=added, all_together=True)
    return [to_owners, stage(members[owner], members[source], blocks[owner], all_together=True)]


def rings_of_ranges(setting: Setting, steps: list[tuple[str, int]]) -> Messages:
    """Send the ranges one by one around the ring of all ranks. steps: ("reduce-scatter" or "all-gather", range index).

    If the ranges are unknown, range 0 is the whole vector.
    """
    ring = {"reduce-scatter": ring_reduce_scatter, "all-gather": ring_all_gather}
    count = len(setting.placement)
    blocks = [setting.blocks(count, elements) for elements in setting.ranges or (setting.elements,)]
    return [stage for what, index in steps for stage in ring[what](setting.ranks, blocks[index])], []


def two_trees(setting: Setting) -> Messages:
    """Send half of the vector up and down each of two binary trees, in pipelined segments that form one stage."""
    count = len(setting.placement)
    messages = []
    for parents, half in zip(double_tree(count), setting.blocks(2), strict=True):
        child = np.array([rank for rank in range(count) if parents[rank] is not None], np.int64)
        parent = np.array([parents[rank] for rank in child], np.int64)
        for source, destination in ((child, parent), (parent, child)):
            messages.append(np.stack([source, destination, np.full(len(child), half)]))
    steps = 2 * (count - 1).bit_length()  # up and down
    # A rank has at most two children in both trees together, so it adds at most two halves.
    added = int(2 * setting.blocks(2).max())
    return [stage(*np.concatenate(messages, axis=1), steps=steps, added_meanwhile=added, all_together=True)], []


def message_schedule(messages: Callable[[Setting], Messages], setting: Setting) -> Messages:
    """Return a strategy's messages for one step; none on a single rank.

    UnknownChoice if the library's algorithm is not known. Bytes of rooted calls on more than MOST_ROOTS ranks are
    estimates.
    """
    return messages(setting) if len(setting.placement) > 1 else ([], [])
