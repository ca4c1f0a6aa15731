"""hierarchical: the node's gradients are summed in memory its ranks share, and the nodes' sums around a ring of nodes.

    each bucket: its lanes' rings of nodes, each adding its node's ranks' gradients on the way
    AdamW: each rank its part of the node's one copy of the parameters

A node's port carries 2 (M-1)/M D each way, the bound. The ranks of a node share the work: of as many lanes as the
smallest node has ranks, rank l of each node drives the ring of lane l, on its part of every bucket. A rank holds the
optimizer state of its part (2 D / ranks of the node); parameters are there once a node. Nothing is copied to share it.
Halfway round, each sum is complete on one rank: the gradients' norm is summed up while the other half travels.

On GPUs it is another form, Replicated over dist/gpu/node_exchange.py: ranks cannot read each other's GPU memory as they
read a shared window, so the sums of a node are made by messages as well, and each rank has all parameters.
"""

from dist.buffers import NodeBuffers
from dist.cost.memory import Memory
from dist.cost.messages import ring_of_nodes
from dist.gpu.node_exchange import NodeExchange
from dist.mpi import MPI
from dist.ranges import cut, cut_range
from dist.waiting import EarlySum, wait
from strategies.base import OnGpus
from strategies.bucketed import InBuckets
from strategies.replicated import Replicated


class Hierarchical(InBuckets):
    name, line = "hierarchical", "sums in the node, a ring of nodes"
    shares_sums = knows_nodes = True
    auto = ("host", "gpus")
    memory = Memory(optimizer="2/L", shared_in_node=True)
    on_gpus = OnGpus({"float32": NodeExchange, "bfloat16": NodeExchange}, form=Replicated)
    messages = staticmethod(ring_of_nodes)
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
        self.arrivals = 0
        self._new_optimizers(job)

    def _new_optimizers(self, job):
        size = len(self.parameters)
        self.own = slice(*cut(size, len(self.local_ranks))[job.world.local_rank])
        self.squares = EarlySum(self.comm, 0 if self.lane is None else len(self.buckets))
        self.optimizer = job.new_optimizer(self.own.start, self.own.stop)

    def start_exchange(self, start, stop):
        self._arrive()
        if self.lane is not None:
            exchange = self._lane_exchange(*cut_range(start, stop, len(self.lanes))[self.lane])
            self.exchange.progress.start(self._when_all_arrived(exchange, self.arrivals))

    def _when_all_arrived(self, exchange, arrivals):
        yield self.node.arrived(self.local_ranks, arrivals)
        yield from exchange

    def _lane_exchange(self, start, stop):
        return self.exchange.allreduce(self.node_sum, start, stop, self._add_squares)

    def _add_squares(self, start, stop):
        self.squares.add(self.sum_of_squares(self.node_sum[start:stop]))

    def update(self, lr):
        with self.tracer.phase("allreduce", bytes=self.gradients.nbytes):
            self.finish_exchange()
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
