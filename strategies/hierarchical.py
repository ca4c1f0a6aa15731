"""hierarchical: the node's gradients are summed in memory its ranks share, and the nodes' sums around a ring of nodes.

    each bucket: its lanes' rings of nodes, each adding its node's ranks' gradients on the way
    AdamW: each rank its part of the node's one copy of the parameters

A node's port carries 2 (M-1)/M D each way, the bound. The ranks of a node share the work: of as many lanes as the
smallest node has ranks, rank l of each node drives the ring of lane l, on its part of every bucket. A rank holds the
optimizer state of its part (2 D / ranks of the node); parameters are there once a node. Nothing is copied to share it.
Halfway round, each sum is complete on one rank: the gradients' norm is summed up while the other half travels.
"""

from mpi4py import MPI

from dist.buffers import NodeBuffers
from dist.host import ring
from dist.ranges import cut
from dist.waiting import EarlySum, wait
from strategies.bucketed import Bucketed


class Hierarchical(Bucketed):
    buffers = NodeBuffers

    def __init__(self, job):
        super().__init__(job)
        world, self.node = job.world, job.buffers
        self.local_ranks = range(world.local_size)
        self.lanes = range(self.comm.allreduce(world.local_size, MPI.MIN))
        self.lane = world.local_rank if world.local_rank in self.lanes else None
        self.lane_comm = self.comm.Split(MPI.UNDEFINED if self.lane is None else self.lane, world.node)
        self.node_sum, *self.addends = self.node.local_gradients
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
            low, high = cut(stop - start, len(self.lanes))[self.lane]
            self.progress.start(self._lane_exchange(start + low, start + high, self.arrivals, next(self.tags)))

    def _lane_exchange(self, start, stop, arrivals, tag):
        yield self.node.arrived(self.local_ranks, arrivals)
        yield from ring.allreduce(
            self.lane_comm, self.node_sum, self.addends, start, stop, self.wire, tag, self._add_squares
        )

    def _add_squares(self, start, stop):
        self.squares.add(self.sum_of_squares(self.node_sum[start:stop]))

    def update(self, lr):
        with self.tracer.phase("allreduce", bytes=self.gradients.nbytes):
            self.finish_exchange()
            squares = self.squares.result()
            self._meet_the_node()
        with self.tracer.phase("update"):
            norm, scale = self.clipping.scale(squares)
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
