"""What the strategies share that exchange buckets, which start when backward has finished them.

A bucket is a flat range that is exchanged together. Without overlap there is one, the whole buffer, after backward.
With it, the ranges that backward finishes are joined to buckets of at least `bucket_bytes`, each begins on the spot,
and `poke` moves them on between the kernels of backward.

A split embedding (Job.lookup) has the head's buckets first, and last the gradients of its looked-up rows: when all else
is through they are added to the head's sums, by dist/host/rows.py.
"""

from dist.cost.overlap import of_buckets
from gpt2.parameters import LOOKUP
from strategies.base import Strategy


class InBuckets(Strategy):
    """A subclass makes `exchange`, and begins one with it in start_exchange. Of a split embedding it makes `rows`, too,
    a RowExchange, and begins with that in start_rows."""

    wires, error_feedback, overlaps = ("float32", "bfloat16"), True, True
    overlap = staticmethod(of_buckets)

    def __init__(self, job):
        super().__init__(job)
        size = len(self.gradients)
        self.overlapping = job.bucket_bytes is not None
        self.buckets = plan_buckets(job.final_ranges, job.bucket_bytes) if self.overlapping else [(0, size)]
        self.started = 0
        self.lookup = job.lookup
        self.head_stop = job.lookup.shape[0] * job.lookup.shape[1] if job.lookup else 0

    def start_exchange(self, start: int, stop: int) -> None:
        """Begin the exchange of a bucket: called once a step for each, in one order on all ranks."""
        raise NotImplementedError

    def start_rows(self) -> None:
        """Begin to add looked-up rows to the sums: called once a step where the embedding is split, after all else."""

    def gradients_final(self, start, stop):
        waits = self.overlapping and self.started < len(self.buckets) and (start, stop) != LOOKUP
        if waits and self.buckets[self.started][0] == start:
            self._start_next()

    def poke(self):
        self.exchange.progress.poke()

    def finish_exchange(self) -> None:
        """Exchange what has not begun, and return when all buckets are through."""
        while self.started < len(self.buckets):
            self._start_next()
        self.exchange.progress.finish()
        self.started = 0
        if self.lookup:
            self.start_rows()
            self.exchange.progress.finish()

    @property
    def bytes_summed(self) -> int:
        """That this rank hands to a step's exchange: gradients, and looked-up rows that go apart."""
        return self.gradients.nbytes + (self.lookup.nbytes if self.lookup else 0)

    def errors(self):
        return self.exchange.errors

    def _start_next(self) -> None:
        self.started += 1
        self.start_exchange(*self.buckets[self.started - 1])

    def is_of_head(self, start: int) -> bool:
        """Whether a bucket that begins there is of a split embedding."""
        return start < self.head_stop


def plan_buckets(final_ranges, bucket_bytes: int) -> list[tuple[int, int]]:
    """The ranges, which follow each other downwards, joined until each holds `bucket_bytes` of float32 or more; a split
    embedding's first ones go down to 0, and the others begin above them again."""
    buckets = []
    low, high = None, None
    for start, stop in final_ranges:
        if high is not None and stop != low:
            buckets.append((low, high))
            high = None
        low, high = start, stop if high is None else high
        if (high - low) * 4 >= bucket_bytes:
            buckets.append((low, high))
            high = None
    if high is not None:
        buckets.append((low, high))
    return buckets
