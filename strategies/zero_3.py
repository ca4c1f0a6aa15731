"""zero-3: zero-2 with sharded parameters too: each layer gathers its parameters for forward and again for backward.

    before a layer, in forward and in backward:  ring all-gather of its parameters (--overlap: one layer ahead)
    gradients as in zero-2;  AdamW on the own part of each range;  no gather after the update

A rank holds 4 D / N: its parts of parameters, sums and moments. It also holds the parameters and gradients of two
layers, in buffers that all layers use in turn. The embeddings are gathered once a step and stay until the next update.
The head needs them from the end of forward to the start of backward, where their gradient is computed, so freeing them
in between would not lower the peak. Each rank sends and receives about 3 (N-1)/N D per microbatch: layers
that are still in memory when forward turns to backward are not gathered again.
"""

from dist.cost.memory import Memory
from dist.cost.messages import rings_of_ranges
from dist.cost.overlap import Overlap, embeddings_share
from dist.sharded import LAYER_SLOTS, ShardedParameters
from strategies.zero_2 import Zero2


def ranges_exchanged(ranges: int, microbatches: int) -> list[tuple[str, int]]:
    """Return the exchanges of one step as in zero_2, with an all-gather before each use of a range that no slot holds.

    The first and the last range have their own slots and are gathered once a step.
    """
    if not ranges:
        return [("all-gather", 0), ("all-gather", 0), ("reduce-scatter", 0)] * microbatches
    steps = []
    slots = {}
    for _ in range(microbatches):
        for uses, reduces in ((range(ranges), False), (reversed(range(ranges)), True)):
            for index in uses:
                slot = index if index in (0, ranges - 1) else ("layer", index % LAYER_SLOTS)
                if slots.get(slot) != index:
                    slots[slot] = index
                    steps.append(("all-gather", index))
                if reduces:
                    steps.append(("reduce-scatter", index))
    return steps


def overlap(training):
    """Let gathers overlap in all microbatches, except for the embeddings, whose parameters are used first."""
    steps = ranges_exchanged(len(training.ranges), training.micro_steps)
    ranges = training.ranges or (training.parameters,)
    vectors = sum(ranges[index] for _, index in steps) / training.parameters
    return Overlap(1.0, embeddings_share(training) * (training.micro_steps + 1) / vectors, 1.0)


class Zero3(Zero2):
    name = "zero-3"
    traits = Zero2.traits.changed(
        line="the same, and parameters gathered for each use",
        memory=Memory("1/N", "1/N", "2/N"),
        buffers=ShardedParameters,
        messages=lambda setting: rings_of_ranges(setting, ranges_exchanged(len(setting.ranges), setting.micro_steps)),
        overlap=overlap,
    )
    _has_masters = True  # gathered ranges share slots, so a rank's part needs its own memory

    def __init__(self, job):
        super().__init__(job)
        self.position = 0
        self.gathered = {}  # {slot: the range that it holds or that is being gathered into it}

    def _own_parameters(self, job):
        return job.buffers.own

    def before_use(self, start, stop):
        part = (start, stop)
        if part in self.gathering or not self._is_gathered(part):
            with self.tracer.interruption("allgather", bytes=4 * (stop - start)):
                self._gather(part)
                self.exchange.engine.finish(self.gathering.pop(part))
        ahead = self._next_after(part)
        if self.overlapping and ahead is not None:
            self._gather(ahead)

    def _next_after(self, part):
        """Return the range that the model uses next, in its current direction."""
        position = self.ranges.index(part)
        step = -1 if 0 < position <= self.position else 1
        self.position = position
        return self.ranges[position + step] if position + step < len(self.ranges) else None

    def _is_gathered(self, part):
        return self.gathered.get(self.parameters.slot_of[part]) == part

    def _gather(self, part):
        """Start the all-gather of a range into its slot, unless the range is there or being gathered."""
        if not self._is_gathered(part):
            self.gathered[self.parameters.slot_of[part]] = part
            self.gathering[part] = self.exchange.engine.start(self._all_gather(*part))

    def _share_parameters(self):
        self.gathered.clear()
