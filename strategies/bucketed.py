"""Base class for strategies that exchange gradient buckets as backward produces them.

A bucket is a flat range that is exchanged together. Without overlap the whole buffer is one bucket, exchanged after
backward. With overlap, ranges that backward finishes are joined into buckets of at least `bucket_bytes`. The exchange
of each starts at once, and on the host `progress` advances it between the kernels of backward.

If the sparse embedding gradient is exchanged separately (Job.sparse), the buckets of the head (the token embedding as
output layer) come first. The sparse rows come last, and dist/host/sparse_exchange.py adds them to the head's sums.
"""

from dist.cost.overlap import of_buckets
from strategies.base import Strategy
from strategies.traits import Traits


class Bucketed(Strategy):
    """Subclasses define `exchange`, `start_bucket`; to split the embedding also `sparse_exchange`, `start_sparse`."""

    traits = Traits(wires=("float32", "bfloat16"), error_feedback=True, overlaps=True, overlap=of_buckets)

    def __init__(self, job):
        super().__init__(job)
        self.overlapping = job.bucket_bytes is not None
        whole = [(0, len(self.gradients))]
        self.buckets = plan_buckets(job.final_ranges, job.bucket_bytes) if self.overlapping else whole
        self.started = 0
        self.sparse = job.sparse
        self.head_stop = job.sparse.shape[0] * job.sparse.shape[1] if job.sparse else 0

    def start_bucket(self, start: int, stop: int) -> None:
        """Start the exchange of a bucket. Called once a step for each bucket, in the same order on all ranks."""
        raise NotImplementedError

    def start_sparse(self) -> None:
        """Start adding the sparse rows to the sums. Called once a step, after the sums of all buckets are complete."""

    def gradients_final(self, start, stop):
        # Ranges become final in descending order, so the range with the same start as the next bucket completes it.
        if self.overlapping and self.started < len(self.buckets) and self.buckets[self.started][0] == start:
            self._start_next()

    def progress(self):
        self.exchange.engine.progress()

    def finish_buckets(self) -> None:
        """Start the remaining buckets and wait for all sums. On a GPU, only work queued from now on waits for them."""
        while self.started < len(self.buckets):
            self._start_next()
        self.exchange.engine.finish()
        self.started = 0
        if self.sparse:
            self.start_sparse()
            self.exchange.engine.finish()

    @property
    def bytes_summed(self) -> int:
        """Bytes of gradients that this rank contributes to a step's exchange."""
        return self.gradients.nbytes + (self.sparse.nbytes if self.sparse else 0)

    def errors(self):
        return self.exchange.errors

    def is_head(self, start: int) -> bool:
        """Return whether a bucket that begins at `start` belongs to the head of a split embedding."""
        return start < self.head_stop

    def _start_next(self) -> None:
        self.started += 1
        self.start_bucket(*self.buckets[self.started - 1])


def plan_buckets(final_ranges, bucket_bytes: int) -> list[tuple[int, int]]:
    """Join adjacent ranges, given in descending order, into buckets of at least `bucket_bytes` of float32.

    The head's ranges of a split embedding come first and go down to 0. The other ranges lie above, in new buckets.
    """
    buckets = []
    low = high = None
    for start, stop in final_ranges:
        if high is not None and stop != low:
            buckets.append((low, high))
            high = None
        low = start
        high = stop if high is None else high
        if (high - low) * 4 >= bucket_bytes:
            buckets.append((low, high))
            high = None
    if high is not None:
        buckets.append((low, high))
    return buckets
