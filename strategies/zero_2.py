"""zero-2: a rank holds the optimizer state and the summed gradients of its part alone (Rajbhandari et al. 2020).

    each range that backward finishes, in each micro-step:  ring reduce-scatter, the own part added to a sum
    AdamW on the own part of each range;  each range: ring all-gather of the parameters

--overlap: the all-gathers go on during the next forward, which waits for each range's when it comes to use it.

The ranges are the layers, the embeddings, the final LayerNorm; each is cut among all ranks. A rank holds D parameters
and, for its parts, 3 D / N: sums and moments. No gradient vector is whole: layers write theirs in two buffers in turn,
one travelling while the next is computed (--overlap), and the embeddings have one of their own. Through each rank go
(N-1)/N D in and out a micro-step, and as much a step for the parameters. With bfloat16 on the wire a rank also keeps
its part of the parameters in float32 (D / N), as what is gathered is rounded.
"""

from dist.sharded import ShardedGradients
from strategies.sharded_update import ShardedUpdate


class Zero2(ShardedUpdate):
    buffers = ShardedGradients
    keeps_gradients = False

    def __init__(self, job):
        super().__init__(job)
        self.overlaps = job.bucket_bytes is not None
        self.whole_ranges = dict(job.buffers.ranges)
        self.exchange = job.new_exchange(self.comm, job.buffers.ranges, job.wire, job.segment_bytes)
        self.progress = self.exchange.progress
        self._divide(job, job.buffers.ranges, job.buffers.new_parts())
        self.reduction = None

    def gradients_final(self, start, stop):
        if start not in self.whole_ranges:
            return  # the second half of a layer: it travels with the first, which comes later
        stop = self.whole_ranges[start]
        with self.tracer.interruption("reduce_scatter", bytes=4 * (stop - start)):
            if self.reduction is not None:
                self.progress.finish(self.reduction)  # of the range before: the next one is written where it lies
            self.reduction = self.progress.start(self._reduce_scatter(start, stop))
            if not self.overlaps or start == 0:  # backward has ended: there is nothing to do meanwhile
                self.progress.finish(self.reduction)

    def poke(self):
        self.progress.poke()

    def update(self, lr):
        return self._update_and_share(lr)
