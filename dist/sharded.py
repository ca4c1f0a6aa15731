"""Flat vectors that no rank holds whole: the shard it owns, and room for the ranges that are in use (ZeRO).

zeros(length) makes their memory: the host's, or a GPU's (dist/gpu/buffers.py).
"""

from itertools import accumulate

import numpy as np

from dist.buffers import OwnBuffers, host_zeros
from dist.host import host_ring
from dist.world import World

LAYER_SLOTS = 2  # one range is computed while the one before it, or after it, travels


class OwnedParts:
    """What a rank owns of each range, zeroed: about 1/N of the vector.

    bounds: {(start, stop) of a range: [low, high) of this rank's part of it}. `flat` holds the parts side by side;
    `parts[start, stop]` is a view of the part of one range.
    """

    def __init__(self, bounds: dict[tuple[int, int], tuple[int, int]], zeros=host_zeros):
        self.bounds, self._zeros = bounds, zeros
        stops = [0, *accumulate(high - low for low, high in bounds.values())]
        self.flat = zeros(stops[-1])
        pieces = zip(bounds, stops, stops[1:], strict=False)
        self._views = {part: self.flat[start:stop] for part, start, stop in pieces}

    def __getitem__(self, part: tuple[int, int]) -> np.ndarray:
        return self._views[part]

    def alike(self) -> "OwnedParts":
        """Room for the same parts of another vector."""
        return OwnedParts(self.bounds, self._zeros)


class Slots:
    """Stands in for a flat vector of which a range exists only while its turn lasts.

    The first range and the last have memory of their own. Those between, the layers, take turns in LAYER_SLOTS slots,
    so that a layer and its neighbour never lie in the same one. slot_of: {(start, stop) of a range: its slot}. A single
    range, of a pipeline's stage, is the first.

    slots[start:stop], within one range, is a view, as of a whole vector. It cannot tell which range's values lie there:
    that is for its users to know.
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
    """All of the `parameters`, and room for the ranges of the `gradients` that backward is at (ZeRO-2)."""

    def __init__(self, world: World, size: int, ranges, zeros=host_zeros):
        self._world, self._zeros, self.ranges = world, zeros, ranges
        self.parameters, self.gradients = zeros(size), Slots(ranges, zeros)

    def new_parts(self) -> OwnedParts:
        """Room for this rank's part of each range, on the buffers' device: the part whose sum a ring's reduce-scatter
        leaves here."""
        size, rank = self._world.size, self._world.rank
        return OwnedParts({part: host_ring.own_chunk(size, rank, *part) for part in self.ranges}, self._zeros)


class ShardedParameters(ShardedGradients):
    """Room for the ranges of `parameters` and `gradients` that are in use; `own`: this rank's parameters (ZeRO-3)."""

    def __init__(self, world: World, size: int, ranges, zeros=host_zeros):
        self._world, self._zeros, self.ranges = world, zeros, ranges
        self.parameters, self.gradients = Slots(ranges, zeros), Slots(ranges, zeros)
        self.own = self.new_parts()

    def filled(self, start: int, stop: int) -> None:
        """Keep this rank's part of the range's first parameters, before the next range takes their memory."""
        self.own[start, stop][:] = self.parameters[slice(*self.own.bounds[start, stop])]
