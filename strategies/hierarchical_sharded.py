"""hierarchical-sharded: between the two halves of the nodes' ring each node updates its shard of the parameters.

    each bucket: its lanes' ring reduce-scatters between nodes;  AdamW on the node's shard, its ranks a part each
    each bucket: its lanes' ring all-gathers of the parameters

The bytes of hierarchical, 2 (M-1)/M D through a node's port each way. A node holds 1/M of the optimizer state, a rank
of it 2 D / N where nodes are alike (ZeRO-1). Where what travels is rounded each rank also keeps its part of the
parameters in float32.

--overlap: the all-gathers go on during the next forward, which waits for a range when it comes to use it. They are half
of the exchange, and forward is a third of the compute: too little where the exchange is as long as that. So a part p of
each bucket, a third at most, is all-reduced during backward, updated by every node as in hierarchical, and not gathered
(Job.all_reduced, by the cost model). With a third, of compute and exchange alike two thirds come before the update and
one third after it. The part costs memory: of the optimizer state a rank holds 2 D (p / ranks of its node + (1-p) / N).

A split embedding is gathered last, beside all of forward; before it go the rows that the next step looks up, from the
nodes that have updated them. It has all of backward, too, so none of it is all-reduced, and more of the others is.

On GPUs it is another form, Sharded over dist/gpu/node_exchange.py, for the reason that hierarchical.py gives.
"""

from itertools import chain

from dist.cost.memory import Memory
from dist.cost.overlap import of_buckets
from dist.cost.rows import node_rows_to_owners
from dist.gpu.node_exchange import NodeExchange
from dist.host.ring import own_chunk
from dist.ranges import cut_range
from dist.waiting import Condition, sum_everywhere
from gpt2.parameters import LOOKUP
from strategies.base import OnGpus, Updated
from strategies.hierarchical import Hierarchical
from strategies.sharded import Sharded


class HierarchicalSharded(Hierarchical):
    name, line = "hierarchical-sharded", "the same, update between its halves"
    shares_sums, all_reduces_a_part, row_messages = False, True, staticmethod(node_rows_to_owners)
    memory = Memory(optimizer="2/ML", shared_in_node=True)
    on_gpus = OnGpus({"float32": NodeExchange, "bfloat16": NodeExchange}, form=Sharded)

    @staticmethod
    def overlap(training):
        return of_buckets(training, beside=1.0)  # backward, and the next forward

    def _new_optimizers(self, job):
        self.all_reduced = job.all_reduced if self.overlapping else 0
        # What is gathered after an update, in the order of its use in forward.
        self.gathered = [*([LOOKUP] if self.lookup else []), *reversed(self.buckets)]
        lanes = [lane for bucket in self.buckets for lane in cut_range(*bucket, len(self.lanes))]
        sharded = [(self._middle(*lane), lane[1]) for lane in lanes]
        replicated = [(lane[0], self._middle(*lane)) for lane in lanes if self.overlapping]
        self.sharded = _optimized(job, [_own_shard(job.world, *part) for part in sharded])
        self.replicated = _optimized(job, [_share_in_node(job.world, *part) for part in replicated])
        self.squares_own = [slice(*_own_shard(job.world, *part)) for part in sharded + replicated]
        # Where updates of the sharded parts add up: in the parameters, until _keep_masters copies them.
        self.masters, self.keeps_masters = [self.parameters[part] for part, _ in self.sharded], False
        self.updated, self.awaited = -len(self.gathered), 0  # counts of arrivals: at the last update, and waited for

    def _middle(self, start, stop):
        """Where a lane's part of a bucket ceases to be replicated and begins to be sharded."""
        return start if self.is_of_head(start) else start + int((stop - start) * self.all_reduced)

    def _lane_exchange(self, start, stop):
        middle = self._middle(start, stop)
        sharded = self.exchange.reduce_scatter(self.node_sum, middle, stop)
        if not self.overlapping:
            return sharded
        return chain(sharded, self.exchange.allreduce(self.node_sum, start, middle))

    def _row_exchange(self):
        return self.rows.to_owners(self.node_sum)

    def state(self):
        replicated = [self.parameters[part] for part, _ in self.replicated]
        updated = zip(self.sharded + self.replicated, self.masters + replicated, strict=True)
        return [Updated(part.start, parameters, optimizer) for (part, optimizer), parameters in updated]

    def resumed(self):
        if self.exchange.rounds:
            self._keep_masters()
            self._round_head()
            self._start_gathering()
            self._await_gathered(0, len(self.parameters))

    def update(self, lr):
        with self.tracer.phase("reduce_scatter", bytes=self.bytes_summed):
            self.finish_exchange()
            self._meet_the_node()
        with self.tracer.phase("allreduce", bytes=8):
            squares = sum(self.sum_of_squares(self.node_sum[part]) for part in self.squares_own)
            (squares,) = sum_everywhere(self.comm, squares)
        with self.tracer.phase("update"):
            norm, scale = self.clip(squares)
            self._update_parts(lr, scale)
        rows_bytes = self.lookup.next_nbytes if self.lookup else 0
        with self.tracer.phase("allgather", bytes=self.parameters.nbytes + rows_bytes):
            self._start_gathering()
            if not self.overlapping:
                self._await_gathered(0, len(self.parameters))
        return norm

    def _update_parts(self, lr, scale):
        for part, optimizer in self.replicated:
            optimizer.update(self.parameters[part], self.node_sum[part], lr, scale)
        if self.exchange.rounds and not self.keeps_masters:
            self._keep_masters()
        for (part, optimizer), master in zip(self.sharded, self.masters, strict=True):
            optimizer.update(master, self.node_sum[part], lr, scale)
            if self.keeps_masters:
                self.parameters[part] = master
        self._round_head()

    def _round_head(self):
        """Looked-up rows are the first to go, and from their owners: as all others will see them."""
        for part, _ in self.sharded:
            if self.is_of_head(part.start):
                self.exchange.round(self.parameters, part.start, part.stop)

    def _keep_masters(self):
        """From now on updates add up in copies of the sharded parts, as what is gathered is rounded."""
        self.masters, self.keeps_masters = [self.parameters[part].copy() for part, _ in self.sharded], True

    def _start_gathering(self):
        """Begin to gather the buckets in the order in which forward uses them. Nobody uses the old parameters any more:
        all ranks of the node have met since backward."""
        self._arrive()
        self.updated = self.arrivals
        if self.lookup:
            self.lookup.fetched = True
        for index, part in enumerate(self.gathered):
            gathering = None if self.lane is None else self._lane_gathering(*part)
            self.exchange.progress.start(self._gather(gathering, self.updated + index))

    def _lane_gathering(self, start, stop):
        if (start, stop) == LOOKUP:
            return self.rows.fetch(self.parameters, self.lookup.next_rows())
        low, high = self._of_lane(start, stop)
        return self.exchange.all_gather(self.parameters, self._middle(low, high), high)

    def _gather(self, gathering, earlier):
        """Gather a lane's part, and arrive, after `earlier` arrivals; a rank without a lane only arrives."""
        if gathering is not None:
            yield self.node.arrived(self.local_ranks, self.updated)
            yield from gathering
            yield Condition(lambda: self.arrivals == earlier)  # several are under way, and which one ends first is open
        self._arrive()

    def before_use(self, start, stop):
        self.poke()
        if self._arrivals_with(start, stop) > self.awaited:
            with self.tracer.interruption("allgather"):  # its bytes were counted where update began it
                self._await_gathered(start, stop)

    def _await_gathered(self, start, stop):
        self.awaited = self._arrivals_with(start, stop)
        self.exchange.progress.wait(self.node.arrived(self.lanes, self.awaited))

    def _arrivals_with(self, start, stop):
        """How often a rank with a lane has arrived when it has gathered all that [start, stop) is made of."""
        needed = [part == (start, stop) or (part[0] < stop and start < part[1]) for part in self.gathered]
        return self.updated + max((count for count, is_needed in enumerate(needed, 1) if is_needed), default=0)


def _optimized(job, parts):
    return [(slice(*part), job.new_optimizer(*part)) for part in parts]


def _own_shard(world, start, stop):
    """This rank's share of its node's shard of [start, stop)."""
    return _share_in_node(world, *own_chunk(world.node_count, world.node, start, stop))


def _share_in_node(world, start, stop):
    return cut_range(start, stop, world.local_size)[world.local_rank]
