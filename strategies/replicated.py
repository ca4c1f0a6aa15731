"""What the strategies share that bring all sums to all ranks, where each makes the same update.

    each bucket: all-reduce of the gradients, by whatever the subclass exchanges with;  AdamW everywhere

Each rank holds all optimizer state (2 D). For the norm each rank squares its share of the sums, and one number more is
summed over the ranks. A split embedding's looked-up rows are summed up by a rank each, and go to all.
"""

from dist.cost.rows import rows_everywhere
from dist.host.rows import RowExchange
from dist.ranges import cut, cut_range
from dist.waiting import sum_everywhere
from strategies.bucketed import InBuckets


class Replicated(InBuckets):
    shares_sums = splits_embedding = True
    row_messages = staticmethod(rows_everywhere)

    def __init__(self, job):
        super().__init__(job)
        self.exchange = job.new_exchange(self.comm, self.buckets)
        self.optimizer = job.new_optimizer(0, len(self.parameters))
        self.rows = RowExchange(self.comm, job.lookup, self._cut_rows()) if job.lookup else None
        self.squares_own = slice(*cut(len(self.gradients), self.comm.size)[self.comm.rank])

    def start_exchange(self, start, stop):
        self.exchange.start_allreduce(self.gradients, start, stop)

    def _cut_rows(self):
        """Who adds up which looked-up rows: each rank those of its share of each bucket, as text has more of the first
        tokens of a vocabulary than of the last."""
        head = [bucket for bucket in self.buckets if self.is_of_head(bucket[0])]
        return [(part, rank) for bucket in head for rank, part in enumerate(cut_range(*bucket, self.comm.size))]

    def start_rows(self):
        self.exchange.progress.start(self.rows.everywhere(self.gradients))

    def update(self, lr):
        with self.tracer.phase("allreduce", bytes=self.bytes_summed):
            self.finish_exchange()
        with self.tracer.phase("allreduce", bytes=8):
            (squares,) = sum_everywhere(self.comm, self.sum_of_squares(self.gradients[self.squares_own]))
        with self.tracer.phase("update"):
            norm, scale = self.clip(squares)
            self.optimizer.update(self.parameters, self.gradients, lr, scale)
        return norm
