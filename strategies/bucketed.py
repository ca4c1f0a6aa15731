"""What the strategies share that exchange buckets, which start when backward has finished them.

A bucket is a flat range that is exchanged together. Without overlap there is one, the whole buffer, after backward.
With it, the ranges that backward finishes are joined to buckets of at least `bucket_bytes`, each begins on the spot,
and `poke` moves them on between the kernels of backward.
"""

import itertools

from dist.progress import Progress
from dist.wire import new_wire
from strategies.base import Strategy

TAGS = 1 << 14  # of exchanges that may be under way together; every MPI allows twice as many


class InBuckets(Strategy):
    """A subclass has `progress`, with which start_exchange begins an exchange."""

    def __init__(self, job):
        super().__init__(job)
        size = len(self.gradients)
        self.buckets = [(0, size)] if job.bucket_bytes is None else plan_buckets(job.final_ranges, job.bucket_bytes)
        self.overlaps = job.bucket_bytes is not None
        self.started = 0

    def start_exchange(self, start: int, stop: int) -> None:
        """Begin the exchange of a bucket: called once a step for each, in one order on all ranks."""
        raise NotImplementedError

    def gradients_final(self, start, stop):
        while self.overlaps and self.started < len(self.buckets) and self.buckets[self.started][0] >= start:
            self._start_next()

    def poke(self):
        self.progress.poke()

    def finish_exchange(self) -> None:
        """Exchange what has not begun, and return when all buckets are through."""
        while self.started < len(self.buckets):
            self._start_next()
        self.progress.finish()
        self.started = 0

    def _start_next(self) -> None:
        self.started += 1
        self.start_exchange(*self.buckets[self.started - 1])


class Bucketed(InBuckets):
    """Messages of our own."""

    def __init__(self, job):
        super().__init__(job)
        self.wire = new_wire(job.wire, len(self.gradients), job.segment_bytes, job.error_feedback)
        self.progress = Progress()
        self.tags = itertools.cycle(range(1, TAGS))
        self.exchange_comm = self.comm.Dup()

    def errors(self):
        return self.wire.errors


def plan_buckets(final_ranges, bucket_bytes: int) -> list[tuple[int, int]]:
    """The ranges, which follow each other downwards, joined until each holds `bucket_bytes` of float32 or more."""
    buckets = []
    low, high = None, None
    for start, stop in final_ranges:
        low, high = start, stop if high is None else high
        if (high - low) * 4 >= bucket_bytes:
            buckets.append((low, high))
            high = None
    if high is not None:
        buckets.append((low, high))
    return buckets
