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
from dist.waiting import sum_everywhere
from strategies.base import Strategy, Updated


class Zero2(Strategy):
    buffers = ShardedGradients
    keeps_gradients = False

    def __init__(self, job):
        super().__init__(job)
        self.ranges, self.overlaps = job.buffers.ranges, job.bucket_bytes is not None
        self.whole_ranges = dict(self.ranges)
        self.sums = job.buffers.new_parts()
        self.optimizers = {part: job.new_optimizer(*bounds) for part, bounds in self.sums.bounds.items()}
        self.exchange = job.new_exchange(self.comm, self.ranges, job.wire, job.segment_bytes)
        self.progress = self.exchange.progress
        self.own = self._own_parameters(job)
        self.reduction = None
        self.on_the_way = {}  # by range: the all-gather of its parameters

    def _own_parameters(self, job):
        """This rank's part of each range of the parameters: where they are, or apart if what is gathered is rounded."""
        in_place = {part: self.parameters[slice(*bounds)] for part, bounds in self.sums.bounds.items()}
        if not self.exchange.rounds:
            return in_place
        apart = job.buffers.new_parts()
        for part, values in in_place.items():
            apart[part][:] = values
        return apart

    def before_use(self, start, stop):
        if (start, stop) in self.on_the_way:
            with self.tracer.interruption("allgather"):  # its bytes were counted where update began it
                self.progress.finish(self.on_the_way.pop((start, stop)))

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
        with self.tracer.phase("allreduce", bytes=8):
            (squares,) = sum_everywhere(self.comm, self.sum_of_squares(self.sums.flat))
        with self.tracer.phase("update"):
            norm, scale = self.clipping.scale(squares)
            for part, optimizer in self.optimizers.items():
                optimizer.update(self.own[part], self.sums[part], lr, scale)
            self.sums.flat.fill(0.0)
        self._share_parameters()
        return norm

    def state(self):
        bounds = self.sums.bounds
        return [Updated(bounds[part][0], self.own[part], optimizer) for part, optimizer in self.optimizers.items()]

    def resumed(self):
        if self.exchange.rounds:
            self._share_parameters()

    def _share_parameters(self):
        with self.tracer.phase("allgather", bytes=self.parameters.nbytes):
            self.on_the_way = {part: self.progress.start(self._all_gather(*part)) for part in self.ranges}
            if not self.overlaps:
                self.progress.finish()
                self.on_the_way.clear()

    def _reduce_scatter(self, start, stop):
        yield from self.exchange.reduce_scatter(self.gradients[start:stop])
        self.sums[start, stop][:] += self.gradients[slice(*self.sums.bounds[start, stop])]

    def _all_gather(self, start, stop):
        self.parameters[slice(*self.sums.bounds[start, stop])][:] = self.own[start, stop]
        yield from self.exchange.all_gather(self.parameters[start:stop])
