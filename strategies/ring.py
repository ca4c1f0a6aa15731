"""ring: an all-reduce of our own, around a ring of all ranks in their order, and every rank does the same update.

    ring reduce-scatter(gradients), ring all-gather(gradients);  AdamW everywhere

Each rank holds all optimizer state (2 D) and sends and receives 2 (N-1)/N D. With several ranks a node, in the order of
the nodes, as much goes through each node's port: close to the bound of 2 (M-1)/M D where there are many nodes.
"""

from dist.host import ring
from dist.waiting import sum_everywhere
from strategies.bucketed import Bucketed


class Ring(Bucketed):
    def __init__(self, job):
        super().__init__(job)
        self.optimizer = job.new_optimizer(0, len(self.parameters))
        self.squares_own = slice(*ring.own_chunk(self.comm.size, self.comm.rank, 0, len(self.gradients)))

    def start_exchange(self, start, stop):
        self.progress.start(
            ring.allreduce(self.exchange_comm, self.gradients, [], start, stop, self.wire, next(self.tags))
        )

    def update(self, lr):
        with self.tracer.phase("allreduce", bytes=self.gradients.nbytes):
            self.finish_exchange()
        with self.tracer.phase("allreduce", bytes=8):
            (squares,) = sum_everywhere(self.comm, self.sum_of_squares(self.gradients[self.squares_own]))
        with self.tracer.phase("update"):
            norm, scale = self.clipping.scale(squares)
            self.optimizer.update(self.parameters, self.gradients, lr, scale)
        return norm
