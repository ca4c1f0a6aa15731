"""hierarchical: gradients are summed inside each node in shared memory, and between nodes around a ring.

    each bucket: for each rail a ring of nodes, which adds the gradients of all ranks of a node on the way
    AdamW: each rank on its part of the node's shared parameters

A node's port carries 2 (M-1)/M D each way, the bound. Each bucket is cut into one part per rail; there are as many
rails as the smallest node has ranks. Local rank l of every node runs the ring of rail l, and writes its sums to
`node_sum`, the leader's gradients. A node holds the parameters once, in shared memory; each rank holds the optimizer
state of its part (2 D / ranks of the node).
After half of the ring each sum is complete on one rank: the norm is computed during the other half. With --wire int8,
dist/host/direct_exchange.py takes the ring's place: the port carries as many values, each rounded only twice.

With a split embedding, the node that owns a chunk of the head's sum adds the sparse rows to this chunk after the ring.

On GPUs Replicated runs instead, with dist/gpu/node_exchange.py. Ranks cannot read each other's GPU memory like a shared
window, so messages are also needed for the sums inside a node, and each rank holds all parameters.
"""

from dist.buffers import NodeBuffers
from dist.cost.memory import Memory
from dist.cost.messages import sums_of_nodes
from dist.cost.sparse_rows import node_rows_everywhere
from dist.gpu.node_exchange import NodeExchange
from dist.host.sparse_exchange import SparseExchange
from dist.mpi import MPI
from dist.ranges import cut, cut_range
from dist.waiting import EarlySum, wait
from strategies.bucketed import Bucketed
from strategies.replicated import Replicated
from strategies.traits import OnGpus


class Hierarchical(Bucketed):
    name = "hierarchical"
    traits = Bucketed.traits.changed(
        line="sums in the node, a ring of nodes",
        wires=("float32", "bfloat16", "int8"),
        shares_sums=True,
        knows_nodes=True,
        splits_embedding=True,
        auto=("host", "gpus"),
        memory=Memory(optimizer="2/L", shared_in_node=True),
        buffers=NodeBuffers,
        on_gpus=OnGpus({"float32": NodeExchange, "bfloat16": NodeExchange}, form=Replicated),
        messages=sums_of_nodes,
        sparse_messages=node_rows_everywhere,
    )

    def __init__(self, job):
        super().__init__(job)
        world = job.world
        self.node = job.buffers
        self.rails = range(self.comm.allreduce(world.local_size, MPI.MIN))
        self.rail = world.local_rank if world.local_rank in self.rails else None
        self.node_sum, *addends = self.node.local_gradients
        # A rank without a rail also gets a ring, so that it has an engine and `errors`. This ring exchanges nothing.
        rail_comm = self.comm.Split(world.local_rank, world.node)
        self.exchange = job.new_exchange(rail_comm, self.buckets, addends=addends)
        head = self._cut_head(rail_comm.size)
        self.sparse_exchange = SparseExchange(rail_comm, job.sparse, head) if job.sparse else None
        self._new_optimizers(job)

    def _new_optimizers(self, job):
        self.own = slice(*cut(len(self.parameters), job.world.local_size)[job.world.local_rank])
        self.optimizer = job.new_optimizer(self.own.start, self.own.stop)
        others = sum(not self.is_head(start) for start, _ in self.buckets)
        self.squares = EarlySum(self.comm, 0 if self.rail is None else others + bool(self.sparse))

    def start_bucket(self, start, stop):
        arrivals = self.node.arrive()
        if self.rail is not None:
            exchange = self._rail_exchange(*self._of_rail(start, stop))
            self.exchange.engine.start(self._when_all_arrive(exchange, arrivals))

    def start_sparse(self):
        arrivals = self.node.arrive()
        if self.rail is not None:
            self.exchange.engine.start(self._when_all_arrive(self._sparse_rail_exchange(), arrivals))

    def _when_all_arrive(self, exchange, arrivals):
        """Run a rail's exchange once the gradients of all ranks of the node, which it reads, have arrived."""
        yield self.node.arrived(self.node.local_ranks, arrivals)
        yield from exchange

    def _of_rail(self, start, stop):
        return cut_range(start, stop, len(self.rails))[self.rail]

    def _cut_head(self, nodes):
        """Return [(chunk, node)] for the head's chunks of this rail: the node owns the sum and adds the sparse rows."""
        if self.rail is None:
            return []
        parts = [self._of_rail(*bucket) for bucket in self.buckets if self.is_head(bucket[0])]
        return [(chunk, node) for part in parts for node, chunk in enumerate(cut_range(*part, nodes))]

    def _rail_exchange(self, start, stop):
        return self.exchange.allreduce(self.node_sum, start, stop, self._add_squares)

    def _sparse_rail_exchange(self):
        return self.sparse_exchange.everywhere(self.node_sum)

    def _add_squares(self, start, stop):
        if not self.is_head(start):
            self.squares.add(self.sum_of_squares(self.node_sum[start:stop]))

    def update(self, lr):
        with self.tracer.phase("allreduce", bytes=self.bytes_summed):
            self.finish_buckets()
            if self.sparse and self.rail is not None:  # the sparse rows are in the head's sums now
                own = self.sparse_exchange.own
                self.squares.add(sum(self.sum_of_squares(self.node_sum[slice(*part)]) for part in own))
            squares = self.squares.result()
            wait(self.node.meet())
        with self.tracer.phase("update"):
            norm, scale = self.clip(squares)
            for one in self.state():
                one.optimizer.update(self.parameters[one.range], self.node_sum[one.range], lr, scale)
        with self.tracer.phase("wait"):
            wait(self.node.meet())
        return norm
