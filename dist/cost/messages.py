"""The messages of one step's exchange, which give the exact bytes into and out of every rank and node.

A strategy declares its message schedule as a function of a Setting (strategies/base.py). The functions here build such
schedules: rings and trees of point-to-point messages, and calls of MPI's collectives, whose messages depend on the
library's choice (mpi_choices.py). Each returns (stages, names of the MPI library's algorithms).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from dist.cost.mpi_algorithms import ring_all_gather, ring_reduce_scatter
from dist.cost.mpi_calls import CallGroup, MpiCall
from dist.cost.mpi_choices import LIBRARIES, resolve
from dist.cost.stages import Stage, barrier, stage
from dist.host.host_tree import double_tree
from dist.host.rooted import PIECE_SEGMENTS, WINDOW
from dist.probe.links import LEAST_SEGMENT_BYTES
from dist.ranges import cut, cut_by_node

FLOAT32_BYTES = 4
# Rooted calls: up to MOST_ROOTS roots are modelled one by one. Otherwise FEW_ROOTS evenly spread roots stand for all.
MOST_ROOTS, FEW_ROOTS = 64, 16

Messages = tuple[list[Stage], list[str]]
# Between the halves of an exchange with a sharded update, all ranks sum the norm of the gradient.
NORM: Messages = ([barrier()], [])


@dataclass(frozen=True)
class Setting:
    """The vector that is exchanged, and the ranks that exchange it.

    placement: node of each rank, (ranks,), numbered from 0. elements: of the vector. item: bytes of one element as it
    travels. ranges: elements of each range if a strategy exchanges range by range, () if not known. micro_steps: of one
    step. own_operation: whether MPI's collectives add by --op own, always true if items are not float32.
    """

    placement: np.ndarray
    elements: int
    item: int
    library: str
    ranges: tuple[int, ...]
    micro_steps: int
    own_operation: bool = False

    @property
    def ranks(self) -> np.ndarray:
        return np.arange(len(self.placement))

    @cached_property
    def group(self) -> CallGroup:
        return CallGroup(self.ranks, self.placement)

    @property
    def vector(self) -> int:
        """Bytes of the whole vector."""
        return self.item * self.elements

    @property
    def padded(self) -> int:
        """Bytes of the vector, padded so that all ranks get equal shares."""
        return self.item * (-(-self.elements // len(self.placement)) * len(self.placement))

    def blocks(self, parts: int, elements: int | None = None) -> np.ndarray:
        """Return the bytes of each part of the vector, or of `elements` elements, cut as the strategies cut it."""
        bounds = cut(self.elements if elements is None else elements, parts)
        return self.item * np.array([stop - start for start, stop in bounds], np.int64)

    def call(self, collective: str, size: int, root: int = 0) -> Messages:
        """Make one MPI collective of `size` bytes. UnknownChoice if the library's algorithm is not known."""
        built_in = self.item == FLOAT32_BYTES and not self.own_operation
        return resolve(MpiCall(self.library, collective, self.group, size, self.item, root, built_in=built_in))


def in_turn(*calls: Messages) -> Messages:
    """Join the calls' stages, one after another, and the names of their algorithms, each once."""
    stages = [stage for stages, _ in calls for stage in stages]
    return stages, list(dict.fromkeys(name for _, names in calls for name in names))


def rooted_calls(setting: Setting, collective: str) -> list[Messages]:
    """List one call of a rooted collective per rank, which is the root of its own slice of the vector."""
    slices, calls = setting.blocks(len(setting.placement)), []
    for start, stop in cut(len(slices), len(slices) if len(slices) <= MOST_ROOTS else FEW_ROOTS):
        root = (start + stop - 1) // 2  # stands for all roots from start to stop, which are alike
        stages, names = setting.call(collective, int(slices[root]), root)
        calls.append(([replace(one, repeat=one.repeat * (stop - start)) for one in stages], names))
    return calls


def rooted_calls_together(setting: Setting, collective: str) -> Messages:
    """Make one stage of rooted calls for pieces of the slices, WINDOW of them under way (dist/host/rooted.py)."""
    slices = [stop - start for start, stop in cut_by_node(setting.placement.tolist(), 0, setting.elements)]
    length, ranks = PIECE_SEGMENTS * LEAST_SEGMENT_BYTES // setting.item, len(slices)  # as over slow links
    pieces = max(1, -(-max(slices) // length))
    found, names, steps, added = [], [], 0, 0
    for start, stop in cut(ranks, ranks if ranks <= MOST_ROOTS else FEW_ROOTS):
        root = (start + stop - 1) // 2  # stands for all roots from start to stop, which are alike
        short, longer = divmod(slices[root], pieces)  # `longer` pieces have one element more
        for elements, alike in ((short + 1, longer), (short, pieces - longer)):
            stages, algorithms = setting.call(collective, setting.item * elements, root)
            calls = alike * (stop - start)
            found += [(one.source, one.destination, calls * one.size) for one in stages]
            names += algorithms
            steps, added = max(steps, len(stages)), added + calls * sum(one.added for one in stages)
    messages = [np.concatenate(part) for part in zip(*found, strict=True)]
    turns = -(-pieces * ranks // WINDOW)
    together = stage(*messages, steps=steps * turns, added_meanwhile=added // ranks, all_together=True)
    return [together], list(dict.fromkeys(names))


def ring_of(members: np.ndarray, blocks: np.ndarray) -> Messages:
    """Make a ring reduce-scatter and all-gather of these ranks. blocks: bytes of each member's part, (members,)."""
    return ring_reduce_scatter(members, blocks) + ring_all_gather(members, blocks), []


def ring_of_ranks(setting: Setting) -> Messages:
    """Sum the vector around one ring of all ranks."""
    return ring_of(setting.ranks, setting.blocks(len(setting.placement)))


def ring_of_nodes(setting: Setting) -> Messages:
    """Sum the vector in each node's shared memory, then around a ring of the nodes' leaders."""
    leaders = setting.group.leaders.members
    return ring_of(leaders, setting.blocks(len(leaders)))


def rings_of_ranges(setting: Setting, steps: list[tuple[str, int]]) -> Messages:
    """Send the ranges one by one around the ring of all ranks. steps: ("reduce-scatter" or "all-gather", range index).

    Without known ranges the whole vector, range 0, stands for many small ones.
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


def message_schedule(
    messages: Callable[[Setting], Messages],
    placement: list[int],
    size_bytes: int,
    library: str = "mpich",
    item_bytes: int = FLOAT32_BYTES,
    ranges: tuple[int, ...] = (),
    micro_steps: int = 1,
    own_operation: bool = False,
) -> Messages:
    """Return a strategy's messages of one step; none on one rank. size_bytes: of the whole vector, as it travels.

    placement: node of each rank, nodes numbered 0 .. M-1, none empty. ranges: elements of each range, in order, if the
    strategy exchanges range by range; micro_steps, own_operation: as Setting's. ValueError with one line for an unknown
    library, a placement with gaps, a vector that is no whole number of elements, or ranges that do not add up to it;
    mpi_choices.UnknownChoice, a ValueError too, if the library's algorithm is not known. Bytes of rooted calls on more
    than MOST_ROOTS ranks are estimates.
    """
    if library not in LIBRARIES:
        raise ValueError(f"no MPI library {library!r}: expected one of {', '.join(LIBRARIES)}")
    nodes, item = np.asarray(placement, np.int64), item_bytes
    if not len(nodes) or nodes.min() or len(np.unique(nodes)) != nodes.max() + 1:
        raise ValueError("a placement gives each rank its node, numbered from 0 without gaps")
    if size_bytes <= 0 or size_bytes % item:
        raise ValueError(f"a vector of {size_bytes} bytes: expected a positive multiple of {item}, of an element")
    if (ranges and sum(ranges) * item != size_bytes) or min(ranges, default=1) < 0 or micro_steps < 1:
        raise ValueError(
            f"{len(ranges)} ranges of {sum(ranges)} elements in {micro_steps} micro-steps: expected ranges that make "
            f"up the {size_bytes // item} elements of the vector, and 1 micro-step or more"
        )
    if len(nodes) == 1:
        return [], []
    return messages(Setting(nodes, size_bytes // item, item, library, tuple(ranges), micro_steps, own_operation))
