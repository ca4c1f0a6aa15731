"""hierarchical-sharded: a ring reduce-scatter between nodes, AdamW on the node's shard, a ring all-gather.

    each bucket: for each rail a ring reduce-scatter between nodes;  AdamW on the node's shard, each rank on its part
    each bucket: for each rail a ring all-gather of the parameters (dist/node_memory.py)

A node's port carries 2 (M-1)/M D each way. Without --overlap a rank holds 2 D / N of optimizer state if nodes have
equally many ranks (ZeRO-1). With rounding on the wire each rank also keeps float32 masters of its part.

--overlap: the all-gathers go on during the next forward, which waits for each range before it uses the range. They are
half of the exchange, but forward is only a third of the compute time. So a fraction p = ALL_REDUCED of the vector is
all-reduced during backward and updated by every node, as in hierarchical. Two thirds of the exchange then precede the
update. The rank's optimizer state grows to 2 D (p / ranks of its node + (1-p) / N).

With a split embedding, the rows that the next step uses are gathered first and the head last, so the head's exchange
overlaps with all of backward and all of forward. So none of the head is all-reduced, but more of the other buckets.

On GPUs Sharded runs instead, with dist/gpu/node_exchange.py, for the reason that hierarchical.py gives.
"""

from fractions import Fraction
from itertools import chain

from dist.cost.memory import Memory
from dist.cost.overlap import of_buckets
from dist.cost.sparse_rows import node_rows_to_owners
from dist.gpu.node_exchange import NodeExchange
from dist.node_memory import NodeGathers
from dist.ranges import cut_range
from dist.waiting import sum_everywhere, wait
from strategies.base import Updated
from strategies.bucketed import Bucketed
from strategies.hierarchical import Hierarchical
from strategies.sharded import Sharded
from strategies.traits import OnGpus

ALL_REDUCED = Fraction(1, 3)  # of the vector, with --overlap


class HierarchicalSharded(Hierarchical):
    name = "hierarchical-sharded"
    traits = Hierarchical.traits.changed(
        line="the same, update between its halves",
        wires=Bucketed.traits.wires,
        shares_sums=False,
        memory=Memory(optimizer="2/ML", overlapped="2/3L + 4/3ML", shared_in_node=True),
        on_gpus=OnGpus({"float32": NodeExchange, "bfloat16": NodeExchange}, form=Sharded),
        sparse_messages=node_rows_to_owners,
        overlap=lambda training: of_buckets(training, beside=1.0),  # backward, and the next forward
    )

    def _new_optimizers(self, job):
        world = job.world
        self.all_reduced = all_reduced_share(self.head_stop / len(self.parameters)) if self.overlapping else 0
        gather_count = len(self.buckets) + bool(self.sparse)  # the sparse rows of the next step come first
        self.gathers = NodeGathers(self.node, self.exchange.engine, self.rails, gather_count)
        parts = [part for bucket in self.buckets for part in cut_range(*bucket, len(self.rails))]
        sharded = [_own_shard(world, self._middle(*part), part[1]) for part in parts]
        replicated = [(part[0], self._middle(*part)) for part in parts if self.overlapping]
        self.squares_own = [slice(*shard) for shard in sharded + [_own_shard(world, *part) for part in replicated]]
        wait(self.node.meet())  # then the leader has filled the parameters, and masters can be copied
        self.sharded = [self._updated(job, *shard, has_masters=self.exchange.is_lossy) for shard in sharded]
        self.replicated = [self._updated(job, *_share_in_node(world, *part)) for part in replicated]

    def _updated(self, job, start, stop, has_masters=False):
        own = self.parameters[start:stop]
        return Updated(start, own.copy() if has_masters else own, job.new_optimizer(start, stop))

    def _middle(self, start, stop):
        """Return the index that divides a rail's part of a bucket: all-reduced below, sharded from there on."""
        return start if self.is_head(start) else start + int((stop - start) * self.all_reduced)

    def _rail_exchange(self, start, stop):
        middle = self._middle(start, stop)
        sharded = self.exchange.reduce_scatter(self.node_sum, middle, stop)
        if not self.overlapping:
            return sharded
        return chain(sharded, self.exchange.allreduce(self.node_sum, start, middle))

    def _sparse_rail_exchange(self):
        return self.sparse_exchange.to_owners(self.node_sum)

    def state(self):
        return self.sharded + self.replicated

    def resumed(self):
        if self.exchange.is_lossy:
            self._use_masters()
            self._start_gathers()
            self.gathers.wait(self.gathers.count)

    def update(self, lr):
        with self.tracer.phase("reduce_scatter", bytes=self.bytes_summed):
            self.finish_buckets()
            wait(self.node.meet())
        with self.tracer.phase("allreduce", bytes=8):
            squares = sum(self.sum_of_squares(self.node_sum[part]) for part in self.squares_own)
            (squares,) = sum_everywhere(self.comm, squares)
        with self.tracer.phase("update"):
            norm, scale = self.clip(squares)
            for one in self.state():
                one.optimizer.update(one.parameters, self.node_sum[one.range], lr, scale)
            self._use_masters()
        sparse_bytes = self.sparse.next_nbytes if self.sparse else 0
        with self.tracer.phase("allgather", bytes=self.parameters.nbytes + sparse_bytes):
            self._start_gathers()  # safe: all ranks of the node have met since backward used the old ones
            if not self.overlapping:
                self.gathers.wait(self.gathers.count)
        return norm

    def _use_masters(self):
        """Copy the masters to the parameters, and round those of the head: its rows are sent before its all-gather."""
        for one in self.sharded if self.exchange.is_lossy else []:
            self.parameters[one.range] = one.parameters
            if self.is_head(one.start):
                self.exchange.round_to_wire(self.parameters, one.range.start, one.range.stop)

    def _start_gathers(self):
        """Start all gathers, in the order in which the next step uses the gathered parameters."""
        gathers = []
        if self.sparse:
            self.sparse.fetched = True
        if self.sparse and self.rail is not None:
            gathers.append(self.sparse_exchange.fetch(self.parameters, self.sparse.next_rows()))
        for bucket in reversed(self.buckets) if self.rail is not None else []:
            start, stop = self._of_rail(*bucket)
            gathers.append(self.exchange.all_gather(self.parameters, self._middle(start, stop), stop))
        self.gathers.start(gathers)

    def before_use(self, start, stop):
        """Wait for the sparse rows, and for the buckets that hold parts of [start, stop)."""
        self.progress()
        needed = [count for count, (low, high) in enumerate(reversed(self.buckets), 1) if low < stop and start < high]
        count = max(needed, default=0) + bool(self.sparse)
        if not self.gathers.are_awaited(count):
            with self.tracer.interruption("allgather"):  # `update` counted its bytes
                self.gathers.wait(count)


def all_reduced_share(head: float) -> Fraction:
    """Return the fraction of each other bucket to all-reduce, in 24ths, to reach ALL_REDUCED of the whole vector."""
    return min(Fraction(1), Fraction(round(24 * float(ALL_REDUCED) / (1 - head)), 24))


def _own_shard(world, start, stop):
    """Return this rank's share of its node's shard of [start, stop)."""
    return _share_in_node(world, *cut_range(start, stop, world.node_count)[world.node])


def _share_in_node(world, start, stop):
    return cut_range(start, stop, world.local_size)[world.local_rank]
