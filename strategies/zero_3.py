"""zero-3: parameters, too, are held in parts, and a layer's are gathered for forward and again for backward.

    before a layer, in forward and in backward:  ring all-gather of its parameters (--overlap: one layer ahead)
    gradients as in zero-2;  AdamW on the own part of each range;  nothing to share

A rank holds 4 D / N: its parts of parameters, sums and moments; beside them two layers' parameters and two layers'
gradients, the buffers that all layers take turns in. The embeddings are gathered once a step and stay until the next
update: the head needs them from the end of forward to the start of backward, where their gradient is made, so to free
them in between would not lower the peak. Through each rank go about 3 (N-1)/N D in and out a micro-step; what is
still there where forward turns to backward is not gathered again.
"""

from dist.sharded import ShardedParameters
from strategies.zero_2 import Zero2


class Zero3(Zero2):
    buffers = ShardedParameters
    _keeps_own_apart = True  # the ranges that are in use take turns

    def __init__(self, job):
        super().__init__(job)
        self.position = 0
        self.gathered = {}  # by slot: the range that is there or on its way

    def _own_parameters(self, job):
        return job.buffers.own

    def before_use(self, start, stop):
        part = (start, stop)
        if part in self.on_the_way or not self._is_gathered(part):
            with self.tracer.interruption("allgather", bytes=4 * (stop - start)):
                self._gather(part)
                self.progress.finish(self.on_the_way.pop(part))
        ahead = self._next_after(part)
        if self.overlaps and ahead is not None:
            self._gather(ahead)

    def _next_after(self, part):
        """The range that the model comes to next, in the direction in which it goes through them."""
        position = self.ranges.index(part)
        step = -1 if 0 < position <= self.position else 1
        self.position = position
        return self.ranges[position + step] if position + step < len(self.ranges) else None

    def _is_gathered(self, part):
        return self.gathered.get(self.parameters.slot_of[part]) == part

    def _gather(self, part):
        """Begin a range's all-gather, in the place of the range two before it, unless it has been begun already."""
        if not self._is_gathered(part):
            self.gathered[self.parameters.slot_of[part]] = part
            self.on_the_way[part] = self.progress.start(self._all_gather(*part))

    def _share_parameters(self):
        self.gathered.clear()
