"""hierarchical-sharded: between the two halves of the nodes' ring each node updates its shard of the parameters.

    each bucket: its lanes' ring reduce-scatters between nodes;  AdamW on the node's shard, its ranks a part each
    each bucket: its lanes' ring all-gathers of the parameters

The bytes of hierarchical, 2 (M-1)/M D through a node's port each way. A node holds 1/M of the optimizer state, a rank
of it 2 D / N where nodes are alike (ZeRO-1). With bfloat16 on the wire each rank also keeps its part of the parameters
in float32, as what is gathered is rounded.
"""

from dist import ring
from dist.ranges import cut
from dist.waiting import sum_everywhere
from dist.wire import new_wire
from gpt2.optimizer import clip_scale
from strategies.hierarchical import Hierarchical


class HierarchicalSharded(Hierarchical):
    def _new_optimizers(self, job):
        world = job.world
        parts = [
            (low + begin, low + end)
            for start, stop in self.buckets
            for low, high in self._shards(start, stop, world.node, world.node_count)
            for begin, end in [cut(high - low, world.local_size)[world.local_rank]]
        ]
        self.parts = [(slice(start, stop), job.new_optimizer(start, stop)) for start, stop in parts]
        self.parameter_wire = new_wire(job.wire, len(self.parameters))
        self.masters = None

    def _shards(self, start, stop, node, node_count):
        """The chunks of a bucket that a node owns, one a lane."""
        lanes = [(start + low, start + high) for low, high in cut(stop - start, len(self.lanes))]
        return [ring.own_chunk(node_count, node, *lane) for lane in lanes]

    def _lane_exchange(self, start, stop, arrivals, tag):
        yield self.node.arrived(self.local_ranks, arrivals)
        yield from ring.reduce_scatter(self.lane_comm, self.node_sum, self.addends, start, stop, self.wire, tag)

    def update(self, lr):
        with self.tracer.phase("reduce_scatter", bytes=self.gradients.nbytes):
            self.finish_exchange()
            self._meet_the_node()
        with self.tracer.phase("allreduce", bytes=8):
            squares = sum(self.sum_of_squares(self.node_sum[part]) for part, _ in self.parts)
            (squares,) = sum_everywhere(self.comm, squares)
        with self.tracer.phase("update"):
            norm, scale = clip_scale(squares, self.max_norm)
            self._update_parts(lr, scale)
        with self.tracer.phase("allgather", bytes=self.parameters.nbytes):
            self._meet_the_node()
            self._gather()
            self._meet_the_node()
        return norm

    def _update_parts(self, lr, scale):
        if self.wire.dtype != self.parameters.dtype and self.masters is None:
            self.masters = [self.parameters[part].copy() for part, _ in self.parts]
        for index, (part, optimizer) in enumerate(self.parts):
            if self.masters is None:
                optimizer.update(self.parameters[part], self.node_sum[part], lr, scale)
            else:
                optimizer.update(self.masters[index], self.node_sum[part], lr, scale)
                self.parameters[part] = self.masters[index]

    def _gather(self):
        if self.lane is None:
            return
        for start, stop in self.buckets:
            low, high = cut(stop - start, len(self.lanes))[self.lane]
            bucket = (start + low, start + high)
            tag = next(self.tags)
            self.progress.start(ring.all_gather(self.lane_comm, self.parameters, *bucket, self.parameter_wire, tag))
        self.progress.finish()
