"""Flat vectors that no rank holds whole: the parts it owns, and room for the ranges that are in use (ZeRO)."""

from functools import partial
from itertools import accumulate

import numpy as np

from dist import ring
from dist.buffers import OwnBuffers
from dist.world import World

LAYER_SLOTS = 2  # one range is computed while the one before it, or after it, travels


class Parts:
    """A rank's part of each range, where a ring's reduce-scatter leaves its sum: about 1/N of the vector, zeroed.

    `flat` holds the parts side by side, float32; `parts[start, stop]` is that of one range, a view. bounds[start, stop]
    is where it lies in the whole vector.
    """

    def __init__(self, world: World, ranges):
        self.bounds = {part: ring.own_chunk(world.size, world.rank, *part) for part in ranges}
        stops = [0, *accumulate(high - low for low, high in self.bounds.values())]
        self.flat = np.zeros(stops[-1], np.float32)
        pieces = zip(ranges, stops, stops[1:], strict=False)
        self._views = {part: self.flat[start:stop] for part, start, stop in pieces}

    def __getitem__(self, part: tuple[int, int]) -> np.ndarray:
        return self._views[part]


class Slots:
    """Stands in for a flat vector of which a range exists only while its turn lasts.

    The first range and the last have memory of their own; those between, the layers, take turns in LAYER_SLOTS slots:
    neighbours never meet. slot_of[start, stop] is a range's slot. Indexed [start:stop] within one range it gives a
    view, as a whole vector would; whoever uses it sees to it that what lies there is that range's. zeros(length) makes
    the memory, on a GPU for instance; None: float32 of the host.
    """

    def __init__(self, ranges, zeros=None):
        self.shape = (ranges[-1][1],)
        turns = [1 + index % LAYER_SLOTS for index in range(len(ranges) - 2)]
        self.slot_of = dict(zip(ranges, [0, *turns, 1 + LAYER_SLOTS], strict=True))
        lengths = [0] * (2 + LAYER_SLOTS)
        for (start, stop), slot in self.slot_of.items():
            lengths[slot] = max(lengths[slot], stop - start)
        zeros = zeros or partial(np.zeros, dtype=np.float32)
        self.memory = [zeros(length) for length in lengths]
        self.dtype = self.memory[0].dtype

    def __getitem__(self, part: slice) -> np.ndarray:
        start, slot = next((low, slot) for (low, high), slot in self.slot_of.items() if low <= part.start < high)
        return self.memory[slot][part.start - start : part.stop - start]


class ShardedGradients(OwnBuffers):
    """All `parameters`, and of the `gradients` the ranges that backward is at."""

    def __init__(self, world: World, size: int, ranges):
        self.parameters, self.gradients, self.ranges = np.zeros(size, np.float32), Slots(ranges), ranges


class ShardedParameters(OwnBuffers):
    """Of both `parameters` and `gradients` the ranges that are in use; `own`: this rank's Parts of the parameters."""

    def __init__(self, world: World, size: int, ranges):
        self.parameters, self.gradients, self.ranges = Slots(ranges), Slots(ranges), ranges
        self.own = Parts(world, ranges)

    def filled(self, start: int, stop: int) -> None:
        """Keep this rank's part of the first parameters that have been written."""
        self.own[start, stop][:] = self.parameters[slice(*self.own.bounds[start, stop])]
