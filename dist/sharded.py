"""Flat vectors that no rank holds whole: a rank has its own shard, and buffers for the ranges in use (ZeRO).

zeros(length) allocates their memory, on the host or on a GPU (dist/gpu/buffers.py).
"""

import numpy as np

from dist.buffers import OwnBuffers, host_zeros
from dist.ranges import cut_range, side_by_side
from dist.world import World

LAYER_SLOTS = 2  # the model computes one range while a neighbouring range is exchanged


class OwnedParts:
    """A rank's part of each range, zeroed: about 1/N of the vector.

    bounds: {(start, stop) of a range: [low, high) of this rank's part of it}. `flat` holds the parts side by side;
    `parts[start, stop]` is a view of the part of one range.
    """

    def __init__(self, bounds: dict[tuple[int, int], tuple[int, int]], zeros=host_zeros):
        self.bounds = bounds
        self._zeros = zeros
        lengths = [high - low for low, high in bounds.values()]
        self.flat = zeros(sum(lengths))
        places = zip(bounds, side_by_side(lengths), strict=True)
        self._views = {part: self.flat[slice(*place)] for part, place in places}

    def __getitem__(self, part: tuple[int, int]) -> np.ndarray:
        return self._views[part]

    def alike(self) -> "OwnedParts":
        """Return zeroed memory for the same parts of another vector."""
        return OwnedParts(self.bounds, self._zeros)


class Slots:
    """Stands in for a flat vector whose ranges take turns in less memory.

    The first and the last range have memory of their own. The layers between them take turns in LAYER_SLOTS slots, so a
    layer and its neighbour never share one. slot_of: {(start, stop) of a range: its slot}. slots[start:stop], within
    one range, is a view, as of a whole vector; the user must know which range it holds at the moment.
    """

    def __init__(self, ranges, zeros=host_zeros):
        self.shape = (ranges[-1][1],)
        turns = [1 + index % LAYER_SLOTS for index in range(len(ranges) - 2)]
        self.slot_of = dict(zip(ranges, [0, *turns, 1 + LAYER_SLOTS], strict=False))
        lengths = [0] * (2 + LAYER_SLOTS)
        for (start, stop), slot in self.slot_of.items():
            lengths[slot] = max(lengths[slot], stop - start)
        self.memory = [zeros(length) for length in lengths]
        self.dtype = self.memory[0].dtype

    def __getitem__(self, part: slice) -> np.ndarray:
        start, slot = next((low, slot) for (low, high), slot in self.slot_of.items() if low <= part.start < high)
        return self.memory[slot][part.start - start : part.stop - start]


class ShardedGradients(OwnBuffers):
    """All `parameters`, and buffers for the ranges of `gradients` that backward works on (ZeRO-2)."""

    def __init__(self, world: World, size: int, ranges, zeros=host_zeros):
        self._world = world
        self._zeros = zeros
        self.ranges = ranges
        self.parameters = self._new_parameters(size)
        self.gradients = Slots(ranges, zeros)

    def _new_parameters(self, size: int):
        return self._zeros(size)

    def new_parts(self) -> OwnedParts:
        """Return memory on the same device for this rank's part of each range, as a ring's reduce-scatter cuts it."""
        world = self._world
        return OwnedParts({part: cut_range(*part, world.size)[world.rank] for part in self.ranges}, self._zeros)


class ShardedParameters(ShardedGradients):
    """Buffers for the ranges of `parameters` and `gradients` in use, and `own`, this rank's parameters (ZeRO-3)."""

    def __init__(self, world: World, size: int, ranges, zeros=host_zeros):
        super().__init__(world, size, ranges, zeros)
        self.own = self.new_parts()

    def _new_parameters(self, size: int):
        return Slots(self.ranges, self._zeros)

    def filled(self, start: int, stop: int) -> None:
        """Keep this rank's part of a range's initial parameters, before the next range overwrites them."""
        self.own[start, stop][:] = self.parameters[slice(*self.own.bounds[start, stop])]
