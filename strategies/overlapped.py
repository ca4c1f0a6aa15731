"""allreduce and reduce-scatter with --overlap: bucket by bucket, while backward computes, on a stream of the GPU's own.

    each bucket that backward finishes:  all-reduce, or reduce-scatter of which each rank owns a part
    AdamW everywhere, or on the own part of each bucket;  each bucket: all-gather of the parameters

A rank holds and sends what it does without overlap. The all-gathers go on during the next forward, which waits for the
buckets of a range when it comes to use it.
"""

import numpy as np

from dist.sharded import Parts
from dist.waiting import sum_everywhere
from strategies.base import Updated
from strategies.bucketed import InBuckets


class OverlappedAllreduce(InBuckets):
    def __init__(self, job):
        super().__init__(job)
        self.exchange = job.new_exchange(self.comm, self.buckets, job.wire, job.segment_bytes)
        self.progress = self.exchange.progress
        self.optimizer = job.new_optimizer(0, len(self.parameters))

    def start_exchange(self, start, stop):
        self.progress.start(self.exchange.allreduce(self.gradients[start:stop]))

    def update(self, lr):
        with self.tracer.phase("allreduce", bytes=self.gradients.nbytes):
            self.finish_exchange()
        with self.tracer.phase("update"):
            norm, scale = self.clipping.scale(self.sum_of_squares(self.gradients))
            self.optimizer.update(self.parameters, self.gradients, lr, scale)
        return norm


class OverlappedReduceScatter(InBuckets):
    def __init__(self, job):
        super().__init__(job)
        self.exchange = job.new_exchange(self.comm, self.buckets, job.wire, job.segment_bytes)
        self.progress = self.exchange.progress
        self.sums = Parts(job.world, self.buckets, lambda length: np.zeros_like(self.gradients[:length]))
        self.optimizers = {bucket: job.new_optimizer(*part) for bucket, part in self.sums.bounds.items()}
        self.on_the_way = []  # (start, stop, all-gather of its parameters), in the order in which they began

    def start_exchange(self, start, stop):
        self.progress.start(self._reduce_scatter(start, stop))

    def _reduce_scatter(self, start, stop):
        yield from self.exchange.reduce_scatter(self.gradients[start:stop])
        self.sums[start, stop][:] = self.gradients[slice(*self.sums.bounds[start, stop])]

    def update(self, lr):
        with self.tracer.phase("reduce_scatter", bytes=self.gradients.nbytes):
            self.finish_exchange()
        with self.tracer.phase("allreduce", bytes=8):
            (squares,) = sum_everywhere(self.comm, self.sum_of_squares(self.sums.flat))
        with self.tracer.phase("update"):
            norm, scale = self.clipping.scale(squares)
            for bucket, optimizer in self.optimizers.items():
                part = slice(*self.sums.bounds[bucket])
                optimizer.update(self.parameters[part], self.sums[bucket], lr, scale)
        with self.tracer.phase("allgather", bytes=self.parameters.nbytes):
            for start, stop in reversed(self.buckets):  # forward begins with the bucket that backward ended with
                gathering = self.progress.start(self.exchange.all_gather(self.parameters[start:stop]))
                self.on_the_way.append((start, stop, gathering))
        return norm

    def before_use(self, start, stop):
        while self.on_the_way and self.on_the_way[0][0] < stop:
            with self.tracer.interruption("allgather"):  # its bytes were counted where update began it
                *_, gathering = self.on_the_way.pop(0)
                self.progress.finish(gathering)

    def state(self):
        parts = [slice(*part) for part in self.sums.bounds.values()]
        optimizers = self.optimizers.values()
        return [Updated(p.start, self.parameters[p], o) for p, o in zip(parts, optimizers, strict=True)]
