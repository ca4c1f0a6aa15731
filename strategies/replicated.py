"""Base class for strategies that send all gradient sums to all ranks, which all make the same update.

    each bucket: all-reduce of the gradients, by the exchange that the subclass names;  AdamW on every rank

Each rank holds all optimizer state (2 D). For the norm each rank computes the sum of squares of
its share, and the ranks add these up. Each sparse row of a split embedding is summed by one rank and sent to all.
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
        """Return [(range, rank)]: the rank that adds up the sparse rows in a range, a share of each bucket per rank.

        One range per rank would be uneven: text uses the first tokens of a vocabulary more often than the last.
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
