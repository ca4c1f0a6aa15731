"""What the strategies share that update a part of each range of the parameters, and then gather everyone's parts.

    each range: reduce-scatter of its gradients;  AdamW on the own part;  each range: all-gather of its parameters

A rank holds the optimizer state of its parts, 2 D / N where all ranks own alike. Where what travels is rounded it also
holds the parameters of its parts in float32 (D / N): what is gathered is rounded, and updates must add up unrounded.
"""

from dist.sharded import Parts
from dist.waiting import sum_everywhere
from strategies.base import Strategy, Updated
from strategies.bucketed import InBuckets


class ShardedUpdate(Strategy):
    """A subclass has `exchange`, and `overlapping`: whether all-gathers go on during the next forward, which waits for
    those of a range when it comes to use it. phases: of the timer, what its halves are called."""

    phases = "reduce_scatter", "allgather"

    def _divide(self, job, ranges, sums: Parts) -> None:
        """ranges: of the parameters, upwards. sums: room for the sums that this rank owns of their gradients."""
        self.ranges, self.sums = ranges, sums
        bounds = {part: own for part, own in sums.bounds.items() if own[0] < own[1]}
        self.optimizers = {part: job.new_optimizer(*own) for part, own in bounds.items()}
        self.own = self._own_parameters(job)
        self.on_the_way = {}  # by range, in the order in which they began: the all-gather of its parameters

    @property
    def _keeps_own_apart(self) -> bool:
        """Whether this rank's parts lie beside the parameters: what is gathered is rounded, and updates add up."""
        return self.exchange.rounds

    def _own_parameters(self, job):
        """This rank's part of each range of the parameters."""
        in_place = {part: self.parameters[slice(*bounds)] for part, bounds in self.sums.bounds.items()}
        if not self._keeps_own_apart:
            return in_place
        apart = self.sums.alike()
        for part, values in in_place.items():
            apart[part][:] = values
        return apart

    def before_use(self, start, stop):
        for part in [part for part in self.on_the_way if part[0] < stop]:
            with self.tracer.interruption(self.phases[1]):  # its bytes were counted where update began it
                self.exchange.progress.finish(self.on_the_way.pop(part))

    def _update_and_share(self, lr):
        """From the sums to new parameters, on all ranks or on the way there; returns the norm."""
        with self.tracer.phase("allreduce", bytes=8):
            (squares,) = sum_everywhere(self.comm, self.sum_of_squares(self.sums.flat))
        with self.tracer.phase("update"):
            norm, scale = self.clip(squares)
            for part, optimizer in self.optimizers.items():
                optimizer.update(self.own[part], self.sums[part], lr, scale)
            self.sums.flat.fill(0.0)
        self._share_parameters()
        return norm

    def _share_parameters(self):
        with self.tracer.phase(self.phases[1], bytes=self.parameters.nbytes):
            progress = self.exchange.progress
            self.on_the_way = {part: progress.start(self._all_gather(*part)) for part in self.ranges}
            if not self.overlapping:
                progress.finish()
                self.on_the_way.clear()

    def state(self):
        bounds = self.sums.bounds
        return [Updated(bounds[part][0], self.own[part], optimizer) for part, optimizer in self.optimizers.items()]

    def resumed(self):
        if self.exchange.rounds:
            self._share_parameters()

    def _reduce_scatter(self, start, stop):
        yield from self.exchange.reduce_scatter(self.gradients, start, stop)
        total = self.sums[start, stop]
        total += self.gradients[slice(*self.sums.bounds[start, stop])]

    def _all_gather(self, start, stop):
        if self._keeps_own_apart:
            self.parameters[slice(*self.sums.bounds[start, stop])][:] = self.own[start, stop]
        yield from self.exchange.all_gather(self.parameters, start, stop)


class Sharded(InBuckets, ShardedUpdate):
    """Bucket by bucket: the form of the strategies that gather parameters, where each exchange is a queued call."""

    def __init__(self, job):
        super().__init__(job)
        self.exchange = self._new_exchange(job)
        owned = {bucket: self.exchange.own_part(*bucket) for bucket in reversed(self.buckets)}
        self._divide(job, [*owned], Parts(owned, job.buffers.zeros))

    def _new_exchange(self, job):
        return job.new_exchange(self.comm, self.buckets)

    def start_exchange(self, start, stop):
        self.exchange.progress.start(self._reduce_scatter(start, stop))

    def update(self, lr):
        with self.tracer.phase(self.phases[0], bytes=self.gradients.nbytes):
            self.finish_exchange()
        return self._update_and_share(lr)
