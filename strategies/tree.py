"""tree: an all-reduce of our own, half of the vector up and down each of two binary trees of all ranks.

    for each tree: sum its half of the gradients up to its root, send it down again;  AdamW everywhere

Each rank holds all optimizer state (2 D). A rank inside one tree sends and receives 2 D: more than around the ring, in
2 log2(N) dependent messages instead of 2 (N-1). Use it for many ranks and small models.
"""

from dist.host import tree
from strategies.ring import Ring


class Tree(Ring):
    def start_exchange(self, start, stop):
        tags = next(self.tags), next(self.tags)
        for exchange in tree.allreduce(self.exchange_comm, self.gradients, start, stop, self.wire, tags):
            self.progress.start(exchange)
