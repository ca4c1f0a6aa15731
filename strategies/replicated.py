"""Base class for strategies that bring all sums to all ranks, where each rank makes the same update.

    each bucket: all-reduce of the gradients, with the exchange that the subclass names;  AdamW everywhere

Each rank holds all optimizer state (2 D). For the norm each rank squares its share of the sums, and the ranks add up
one number each. Sparse rows of a split embedding are summed by one rank each, and go to all.
"""

from dist.cost.sparse_rows import rows_everywhere
from dist.host.sparse_exchange import SparseExchange
from dist.ranges import cut, cut_range
from dist.waiting import sum_everywhere
from strategies.bucketed import Bucketed


class Replicated(Bucketed):
    traits = Bucketed.traits.changed(shares_sums=True, splits_embedding=True, sparse_messages=rows_everywhere)

    def __init__(self, job):
        super().__init__(job)
        self.exchange = job.new_exchange(self.comm, self.buckets)
        self.optimizer = job.new_optimizer(0, len(self.parameters))
        self.sparse_exchange = SparseExchange(self.comm, job.sparse, self._cut_rows()) if job.sparse else None
        self.squares_own = slice(*cut(len(self.gradients), self.comm.size)[self.comm.rank])

    def start_bucket(self, start, stop):
        self.exchange.start_allreduce(self.gradients, start, stop)

    def start_sparse(self):
        self.exchange.engine.start(self.sparse_exchange.everywhere(self.gradients))

    def _cut_rows(self):
        """Return which rank adds up which sparse rows: a share of each bucket, not one stretch of the whole table.

        A text uses the first tokens of a vocabulary more than the last.
        """
        head = [bucket for bucket in self.buckets if self.is_head(bucket[0])]
        return [(part, rank) for bucket in head for rank, part in enumerate(cut_range(*bucket, self.comm.size))]

    def update(self, lr):
        with self.tracer.phase("allreduce", bytes=self.bytes_summed):
            self.finish_buckets()
        with self.tracer.phase("allreduce", bytes=8):
            (squares,) = sum_everywhere(self.comm, self.sum_of_squares(self.gradients[self.squares_own]))
        with self.tracer.phase("update"):
            norm, scale = self.clip(squares)
            self.optimizer.update(self.parameters, self.gradients, lr, scale)
        return norm
