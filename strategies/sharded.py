"""Base classes for strategies where each rank updates its part of each range, and all ranks gather all parts.

    each range: reduce-scatter of its gradients;  AdamW on the own part;  each range: all-gather of its parameters

A rank holds the optimizer state of its parts, 2 D / N if all ranks own equally much. With rounding on the wire it also
holds float32 masters of its parts (D / N): rounded parameters cannot accumulate small updates.
"""

from dist.sharded import OwnedParts
from dist.waiting import sum_everywhere
from strategies.base import Strategy, Updated
from strategies.bucketed import Bucketed


class ShardedUpdate(Strategy):
    """A subclass defines `exchange`, and `overlapping`: whether all-gathers go on during the next forward, which waits
    for each range before it uses the range. `phases` names the two halves of the exchange for the tracer."""

    phases = "reduce_scatter", "allgather"

    def _divide(self, job, sums: OwnedParts) -> None:
        """Set up this rank's parts and optimizers. sums: buffers for its sums of all ranges, in ascending order."""
        self.ranges = list(sums.bounds)
        self.sums = sums
        self.optimizers = {part: job.new_optimizer(*own) for part, own in sums.bounds.items() if own[0] < own[1]}
        self.own = self._own_parameters(job)
        self.gathering = {}  # {range: its all-gather} of those in flight, in the order in which they started

    @property
    def _has_masters(self) -> bool:
        """Whether this rank keeps float32 masters of its parts, because `parameters` are rounded on the wire."""
        return self.exchange.is_lossy

    def _own_parameters(self, job):
        """Return this rank's part of each range of the parameters."""
        in_place = {part: self.parameters[slice(*bounds)] for part, bounds in self.sums.bounds.items()}
        if not self._has_masters:
            return in_place
        masters = self.sums.alike()
        for part, values in in_place.items():
            masters[part][:] = values
        return masters

    def before_use(self, start, stop):
        for part in [part for part in self.gathering if part[0] < stop]:
            with self.tracer.interruption(self.phases[1]):  # `update` counted its bytes
                self.exchange.engine.finish(self.gathering.pop(part))

    def update(self, lr):
        """Update the own parts from the sums, and gather them on all ranks (with overlap: start to gather them)."""
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
            engine = self.exchange.engine
            self.gathering = {part: engine.start(self._all_gather(*part)) for part in self.ranges}
            if not self.overlapping:
                engine.finish()
                self.gathering.clear()

    def state(self):
        bounds = self.sums.bounds
        return [Updated(bounds[part][0], self.own[part], optimizer) for part, optimizer in self.optimizers.items()]

    def resumed(self):
        if self.exchange.is_lossy:
            self._share_parameters()

    def _reduce_scatter(self, start, stop):
        yield from self.exchange.reduce_scatter(self.gradients, start, stop)
        total = self.sums[start, stop]
        total += self.gradients[slice(*self.sums.bounds[start, stop])]

    def _all_gather(self, start, stop):
        if self._has_masters:
            self.parameters[slice(*self.sums.bounds[start, stop])][:] = self.own[start, stop]
        yield from self.exchange.all_gather(self.parameters, start, stop)


class Sharded(Bucketed, ShardedUpdate):
    """The base class for strategies that shard each bucket. Between GPUs each exchange is one queued call."""

    def __init__(self, job):
        super().__init__(job)
        self.exchange = self._new_exchange(job)
        owned = {bucket: self.exchange.own_part(*bucket) for bucket in reversed(self.buckets)}
        self._divide(job, OwnedParts(owned, job.buffers.zeros))

    def _new_exchange(self, job):
        return job.new_exchange(self.comm, self.buckets)

    def start_bucket(self, start, stop):
        self.exchange.engine.start(self._reduce_scatter(start, stop))

    def update(self, lr):
        with self.tracer.phase(self.phases[0], bytes=self.gradients.nbytes):
            self.finish_buckets()
        return super().update(lr)
