"""Messages of the exchanges that go range by range (ZeRO): which range is reduced or gathered when, each on a ring.

The ranges are what a model uses together, in the order of the flat buffer: the embeddings, each layer, the last
LayerNorm. A micro-step goes forward through them and backward; its gradients are exchanged as they become final.
"""

from collections.abc import Callable

import numpy as np

from dist.cost.mpi_algorithms import ring_all_gather, ring_reduce_scatter
from dist.cost.stages import Stage

LAYER_SLOTS = 2  # whose parameters zero-3 holds at once (sharded.py)


def zero_2_steps(ranges: int, micro_steps: int) -> list[tuple[str, int]]:
    """[("reduce-scatter" or "all-gather", index of the range), ...] of one step, in their order.

    ranges: how many; 0 for many small ones, of which the whole vector, range 0, stands for all.
    """
    ranges = max(ranges, 1)
    backward = [("reduce-scatter", index) for index in reversed(range(ranges))]
    return backward * micro_steps + [("all-gather", index) for index in range(ranges)]


def zero_3_steps(ranges: int, micro_steps: int) -> list[tuple[str, int]]:
    """The same, with parameters gathered before each use, unless they still lie in one of the layers' slots.

    The first range and the last, with slots of their own, are gathered once a step.
    """
    if not ranges:
        return [("all-gather", 0), ("all-gather", 0), ("reduce-scatter", 0)] * micro_steps
    steps, slots = [], {}
    for _ in range(micro_steps):
        for uses, reduces in ((range(ranges), False), (reversed(range(ranges)), True)):
            for index in uses:
                slot = index if index in (0, ranges - 1) else ("layer", index % LAYER_SLOTS)
                if slots.get(slot) != index:
                    slots[slot] = index
                    steps.append(("all-gather", index))
                if reduces:
                    steps.append(("reduce-scatter", index))
    return steps


def rings_of_ranges(members: np.ndarray, blocks: list[np.ndarray], steps: list[tuple[str, int]]) -> list[Stage]:
    """blocks: of each range, the bytes of each member's part, (count,)."""
    ring: dict[str, Callable] = {"reduce-scatter": ring_reduce_scatter, "all-gather": ring_all_gather}
    return [stage for what, index in steps for stage in ring[what](members, blocks[index])]
