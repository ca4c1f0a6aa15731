"""Every strategy's messages, and with them the exact bytes into and out of every rank and node.

The strategies with messages of their own (ring, tree, hierarchical and its sharded kin) have one schedule; those that
call MPI's collectives send what the library picks (mpi_choices.py).
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from dist.cost.mpi_algorithms import ring_all_gather, ring_reduce_scatter
from dist.cost.mpi_calls import Call, Group
from dist.cost.mpi_choices import LIBRARIES, resolve
from dist.cost.stages import Stage, barrier, stage
from dist.cost.zero_schedules import rings_of_ranges, zero_2_steps, zero_3_steps
from dist.host.double_tree import double_tree
from dist.ranges import cut

WIRE_BYTES = {"float32": 4, "bfloat16": 2}
# Up to this many roots of calls in turn are looked at one by one; of more, a few evenly spread ones stand for all.
MOST_ROOTS, FEW_ROOTS = 64, 16
# Between the halves of an exchange with a sharded update all ranks add up the gradients' norm.
NORM = ([barrier()], [])


@dataclass(frozen=True)
class Setting:
    """placement: node of each rank, (ranks,), numbered from 0; elements of the vector, and bytes of one on the wire.

    ranges: elements of what ZeRO exchanges at once; micro_steps: whose gradients make a step.
    """

    placement: np.ndarray
    elements: int
    item: int
    library: str
    ranges: tuple[int, ...]
    micro_steps: int

    @property
    def ranks(self) -> np.ndarray:
        return np.arange(len(self.placement))

    @cached_property
    def group(self) -> Group:
        return Group(self.ranks, self.placement)

    def blocks(self, parts: int) -> np.ndarray:
        """Bytes of each part of the vector, cut as the strategies cut it."""
        return part_bytes(self.elements, self.item, parts)

    def call(self, collective: str, size: int, root: int = 0) -> tuple[list[Stage], list[str]]:
        return resolve(Call(self.library, collective, self.group, size, self.item, root))

    @property
    def vector(self) -> int:
        return self.item * self.elements

    @property
    def padded(self) -> int:
        """Bytes of a vector that all ranks can share out evenly."""
        return self.item * (-(-self.elements // len(self.placement)) * len(self.placement))


def part_bytes(elements: int, item: int, parts: int) -> np.ndarray:
    return item * np.array([stop - start for start, stop in cut(elements, parts)], np.int64)


def ring(setting: Setting) -> tuple[list[Stage], list[str]]:
    blocks = setting.blocks(len(setting.placement))
    return ring_reduce_scatter(setting.ranks, blocks) + ring_all_gather(setting.ranks, blocks), []


def tree(setting: Setting) -> tuple[list[Stage], list[str]]:
    """Half the vector up and down each tree, in segments: all of it is one stage."""
    count = len(setting.placement)
    messages, depth = [np.empty((3, 0), np.int64)], 0
    for parents, half in zip(double_tree(count), setting.blocks(2), strict=True):
        child = np.array([rank for rank in range(count) if parents[rank] is not None], np.int64)
        parent = np.array([parents[rank] for rank in child], np.int64)
        for source, destination in ((child, parent), (parent, child)):
            messages.append(np.stack([source, destination, np.full(len(child), half)]))
        depth = max(depth, (count - 1).bit_length())
    # A rank has at most two children in all.
    added = int(2 * setting.blocks(2).max())
    return [
        stage(*np.concatenate(messages, axis=1), steps=max(2 * depth, 1), added_meanwhile=added, all_together=True)
    ], []


def leaders_ring(setting: Setting) -> tuple[list[Stage], list[str]]:
    """Node sums in shared memory, and a ring of the nodes' leaders."""
    leaders = np.sort(np.unique(setting.placement, return_index=True)[1])
    blocks = setting.blocks(len(leaders))
    return ring_reduce_scatter(leaders, blocks) + ring_all_gather(leaders, blocks), []


def zero_2(setting: Setting) -> tuple[list[Stage], list[str]]:
    """Around the ring of all ranks, range by range: gradients reduced in each micro-step, parameters gathered."""
    return _by_ranges(setting, zero_2_steps)


def zero_3(setting: Setting) -> tuple[list[Stage], list[str]]:
    """The same, with parameters gathered in forward and again in backward of each micro-step."""
    return _by_ranges(setting, zero_3_steps)


def _by_ranges(setting: Setting, steps_of) -> tuple[list[Stage], list[str]]:
    ranges = setting.ranges or (setting.elements,)
    blocks = [part_bytes(elements, setting.item, len(setting.placement)) for elements in ranges]
    return rings_of_ranges(setting.ranks, blocks, steps_of(len(setting.ranges), setting.micro_steps)), []


def reduce_bcast(setting: Setting) -> tuple[list[Stage], list[str]]:
    """A dedicated server is a rank like the others here: it adds zeros."""
    return _in_turn(setting.call("reduce", setting.vector), setting.call("bcast", setting.vector))


def sliced(setting: Setting) -> tuple[list[Stage], list[str]]:
    """A reduce to each rank of its slice, one call after another, then as many broadcasts."""
    slices = setting.blocks(len(setting.placement))
    return _in_turn(*_rooted(setting, "reduce", slices), NORM, *_rooted(setting, "bcast", slices))


def _rooted(setting: Setting, collective: str, slices: np.ndarray) -> list[tuple[list[Stage], list[str]]]:
    """The calls of a collective for each slice, whose owner is the root."""
    calls = []
    for root, repeat in _looked_at(len(slices)):
        stages, names = setting.call(collective, int(slices[root]), root)
        calls.append(([replace(one, repeat=one.repeat * repeat) for one in stages], names))
    return calls


def _looked_at(ranks: int) -> list[tuple[int, int]]:
    """(root, how many roots it stands for): all, or FEW_ROOTS from the middles of equal parts."""
    parts = cut(ranks, ranks if ranks <= MOST_ROOTS else FEW_ROOTS)
    return [((start + stop - 1) // 2, stop - start) for start, stop in parts]


def reduce_scatter(setting: Setting) -> tuple[list[Stage], list[str]]:
    halves = [setting.call(collective, setting.padded) for collective in ("reduce_scatter_block", "allgather")]
    return _in_turn(halves[0], NORM, halves[1])


def allreduce(setting: Setting) -> tuple[list[Stage], list[str]]:
    return setting.call("allreduce", setting.vector)


def _in_turn(*calls):
    """The calls' stages one after another, and the names of their algorithms, each once."""
    stages = [stage for stages, _ in calls for stage in stages]
    return stages, list(dict.fromkeys(name for _, names in calls for name in names))


SCHEDULES = {
    "reduce-bcast": reduce_bcast,
    "sliced": sliced,
    "reduce-scatter": reduce_scatter,
    "allreduce": allreduce,
    "ring": ring,
    "tree": tree,
    "hierarchical": leaders_ring,
    "hierarchical-sharded": leaders_ring,
    "zero-2": zero_2,
    "zero-3": zero_3,
}


def schedule(
    strategy: str,
    placement: list[int],
    size_bytes: int,
    library: str = "mpich",
    wire: str = "float32",
    ranges: tuple[int, ...] = (),
    micro_steps: int = 1,
) -> tuple[list[Stage], list[str]]:
    """(stages, names of the MPI library's algorithms) of one step's exchange. size_bytes: the whole vector on the wire.

    placement: node of each rank, nodes numbered 0 .. M-1, none empty. ranges: elements of what ZeRO's strategies
    exchange at once, in order (not known: many small ones); micro_steps: in each of which they do. ValueError with one
    line for an unknown strategy, library or wire dtype, for a placement with gaps, a vector that is no whole number of
    elements, or ranges that do not make it up; mpi_choices.UnknownChoice, a ValueError too, where the library's
    algorithm is not known. Bytes of `sliced` on more than MOST_ROOTS ranks are estimates.
    """
    for what, name, known in (
        ("strategy", strategy, SCHEDULES),
        ("MPI library", library, LIBRARIES),
        ("wire dtype", wire, WIRE_BYTES),
    ):
        if name not in known:
            raise ValueError(f"no {what} {name!r}: expected one of {', '.join(known)}")
    nodes, item = np.asarray(placement, np.int64), WIRE_BYTES[wire]
    if not len(nodes) or nodes.min() or len(np.unique(nodes)) != nodes.max() + 1:
        raise ValueError("a placement gives each rank its node, numbered from 0 without gaps")
    if size_bytes <= 0 or size_bytes % item:
        raise ValueError(f"a vector of {size_bytes} bytes: expected a positive multiple of {item}, the bytes of {wire}")
    if (ranges and sum(ranges) * item != size_bytes) or min(ranges, default=1) < 0 or micro_steps < 1:
        raise ValueError(
            f"{len(ranges)} ranges of {sum(ranges)} elements in {micro_steps} micro-steps: expected ranges that make "
            f"up the {size_bytes // item} elements of the vector, and 1 micro-step or more"
        )
    if len(nodes) == 1:
        return [], []
    return SCHEDULES[strategy](Setting(nodes, size_bytes // item, item, library, tuple(ranges), micro_steps))
