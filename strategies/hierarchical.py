"""hierarchical: the node's gradients are summed in memory its ranks share, and the nodes' sums around a ring of nodes.

    each bucket: its lanes' rings of nodes, each adding its node's ranks' gradients on the way
    AdamW: each rank its part of the node's one copy of the parameters

A node's port carries 2 (M-1)/M D each way, the bound. The ranks of a node share the work: of as many lanes as the
smallest node has ranks, rank l of each node drives the ring of lane l, on its part of every bucket. A rank holds the
optimizer state of its part (2 D / ranks of the node); parameters are there once a node. Nothing is copied to share it.
Halfway round, each sum is complete on one rank: the gradients' norm is summed up while the other half travels.

A split embedding's looked-up rows are added up by the node where the ring leaves the head's sum of that stretch.

On GPUs it is another form, Replicated over dist/gpu/node_exchange.py: ranks cannot read each other's GPU memory as they
read a shared window, so the sums of a node are made by messages as well, and each rank has all parameters.
"""

from dist.buffers import NodeBuffers
from dist.cost.memory import Memory
from dist.cost.messages import ring_of_nodes
from dist.cost.rows import node_rows_everywhere
from dist.gpu.node_exchange import NodeExchange
from dist.host.ring import own_chunk
from dist.host.rows import RowExchange
from dist.mpi import MPI
from dist.ranges import cut, cut_range
from dist.waiting import EarlySum, wait
from strategies.base import OnGpus
from strategies.bucketed import InBuckets
from strategies.replicated import Replicated


class Hierarchical(InBuckets):
    name, line = "hierarchical", "sums in the node, a ring of nodes"
    shares_sums = knows_nodes = splits_embedding = True
    auto = ("host", "gpus")
    memory = Memory(optimizer="2/L", shared_in_node=True)
    on_gpus = OnGpus({"float32": NodeExchange, "bfloat16": NodeExchange}, form=Replicated)
    messages, row_messages = staticmethod(ring_of_nodes), staticmethod(node_rows_everywhere)
    buffers = NodeBuffers

    def __init__(self, job):
        super().__init__(job)
        world, self.node = job.world, job.buffers
        self.local_ranks = range(world.local_size)
        self.lanes = range(self.comm.allreduce(world.local_size, MPI.MIN))
        self.lane = world.local_rank if world.local_rank in self.lanes else None
        self.node_sum, *addends = self.node.local_gradients
        # A rank without a lane has a ring, too, in which nothing is ever exchanged.
        lane_comm = self.comm.Split(world.local_rank, world.node)
        self.exchange = job.new_exchange(lane_comm, self.buckets, addends=addends)
        self.rows = RowExchange(lane_comm, job.lookup, self._cut_head(lane_comm.size)) if job.lookup else None
        self.arrivals = 0
        self._new_optimizers(job)

    def _new_optimizers(self, job):
        size = len(self.parameters)
        self.own = slice(*cut(size, len(self.local_ranks))[job.world.local_rank])
        early = sum(not self.is_of_head(start) for start, _ in self.buckets)
        self.squares = EarlySum(self.comm, 0 if self.lane is None else early + bool(self.lookup))
        self.optimizer = job.new_optimizer(self.own.start, self.own.stop)

    def start_exchange(self, start, stop):
        self._arrive()
        if self.lane is not None:
            exchange = self._lane_exchange(*self._of_lane(start, stop))
            self.exchange.progress.start(self._when_all_arrived(exchange, self.arrivals))

    def _of_lane(self, start, stop):
        return cut_range(start, stop, len(self.lanes))[self.lane]

    def _cut_head(self, nodes):
        """Which node adds up the looked-up rows of each stretch of this lane: the one where the ring leaves its sum."""
        buckets = [bucket for bucket in self.buckets if self.is_of_head(bucket[0]) and self.lane is not None]
        parts = [self._of_lane(*bucket) for bucket in buckets]
        return [(own_chunk(nodes, node, *part), node) for part in parts for node in range(nodes)]

    def start_rows(self):
        self._arrive()
        if self.lane is not None:
            self.exchange.progress.start(self._when_all_arrived(self._row_exchange(), self.arrivals))

    def _row_exchange(self):
        return self.rows.everywhere(self.node_sum)

    def _when_all_arrived(self, exchange, arrivals):
        yield self.node.arrived(self.local_ranks, arrivals)
        yield from exchange

    def _lane_exchange(self, start, stop):
        return self.exchange.allreduce(self.node_sum, start, stop, self._add_squares)

    def _add_squares(self, start, stop):
        if not self.is_of_head(start):
            self.squares.add(self.sum_of_squares(self.node_sum[start:stop]))

    def _add_squares_of_head(self):
        """To which the looked-up rows have been added by now."""
        if self.lookup and self.lane is not None:
            self.squares.add(sum(self.sum_of_squares(self.node_sum[slice(*part)]) for part in self.rows.own))

    def update(self, lr):
        with self.tracer.phase("allreduce", bytes=self.bytes_summed):
            self.finish_exchange()
            self._add_squares_of_head()
            squares = self.squares.result()
            self._meet_the_node()
        with self.tracer.phase("update"):
            norm, scale = self.clip(squares)
            self.optimizer.update(self.parameters[self.own], self.node_sum[self.own], lr, scale)
        with self.tracer.phase("wait"):
            self._meet_the_node()
        return norm

    def _arrive(self):
        self.node.arrive()
        self.arrivals += 1

    def _meet_the_node(self):
        """Return when all ranks of the node have come here, and see what they wrote."""
        self._arrive()
        wait(self.node.arrived(self.local_ranks, self.arrivals))
