"""diloco: each replica trains alone for H steps, then the mean change of all replicas makes an outer Nesterov step.

    each step: as in hierarchical, but among the ranks of a replica (a node, or one rank with --replica rank)
    after every H-th step: for each rail a ring of replicas, which averages global - local;  outer step;  local = global

Douillard et al. 2023 (DiLoCo). With the mean d of the replicas' changes, lr and momentum mu of the outer step:

    velocity = mu velocity + d;   global -= lr (d + mu velocity)      (torch.optim.SGD with nesterov=True)

A node's port carries 2 (M-1)/M D once in H steps, and nothing in between. There are as many rails as the smallest
replica has ranks; local rank l of each replica holds AdamW's moments, global parameters and velocity of rail l's part,
and makes its inner and outer steps.

--fragments P (Douillard et al. 2025, Streaming DiLoCo): the flat buffer is cut into P fragments of equal size, each
about L/P layers. Every H/P steps the next fragment begins to travel, so each begins once in H steps. It is exchanged in
H/P pieces: one starts with each step's first kernel and moves on between the others. So all steps load the ports
evenly. Exactly H/P steps after it began, the fragment makes its outer step. The replica takes the result and adds the
steps that it made meanwhile: local = global + (local - local when the fragment began). The paper mixes local and global
half and half instead, which ended at a higher loss in our trials. With P = H the delay is one step, the shortest.

Validation, samples, exports and `parameters` in checkpoints are the global parameters. They lack the steps since the
last outer step: none if P = 1 and H divides the steps. If P > 1, a fragment's steps enter H/P steps after it begins to
travel, so a run's last H/P to H + H/P - 1 steps do not enter its fragments.

A run that resumes with as many replicas goes on exactly. With another number of replicas all begin at the global
parameters, with moments that the checkpoint has from several replicas, and with the velocity; a fragment that was
under way is dropped.
"""

import math
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from dist.buffers import ReplicaBuffers
from dist.cost.memory import Memory
from dist.cost.overlap import Overlap
from dist.host.exchange import RingExchange
from dist.mpi import MPI
from dist.ranges import cut, cut_range, side_by_side
from dist.waiting import EarlySum, wait
from strategies.base import Updated
from strategies.hierarchical import Hierarchical


class Diloco(Hierarchical):
    name = "diloco"
    traits = Hierarchical.traits.changed(
        line="replicas train alone, and average their change",
        same_weights=False,
        shares_models=False,
        takes_local_steps=True,
        flags=("local_steps", "outer_lr", "outer_momentum", "replica", "fragments"),
        splits_embedding=False,
        sparse_messages=None,
        auto=(),
        memory=Memory(gradients="1 + 3/L", optimizer="2/L", shared_in_node=True),
        buffers=ReplicaBuffers,
        on_gpus=None,
        overlap=lambda training: Overlap(part=1.0, last=0.0, beside=1.0),  # with --fragments
    )

    def __init__(self, job):
        world = job.world
        replica = job.buffers.world
        self.outer = job.outer
        self.period = job.outer.local_steps // job.outer.fragments  # between the starts of two fragments
        self.pieces = self.period if job.outer.fragments > 1 else 1
        self.step = job.steps_made
        self.travelling = None  # the number of the fragment under way
        self.next_piece = None  # [start, stop) of `delta`: the piece of this fragment that the next kernel starts
        self.factor = world.size / replica.size  # the gradients are scaled as parts of the global batch's mean
        self.rail_count = world.comm.allreduce(replica.size, MPI.MIN)
        # A rank without a rail also gets a ring, which exchanges nothing.
        rail_comm = world.comm.Split(replica.rank, world.rank)
        number, self.replicas = replica.comm.bcast((rail_comm.rank, rail_comm.size))
        self.prefix = f"replica_{number}_of_{self.replicas}_"
        super().__init__(replace(job, world=replica, new_exchange=RingExchange))
        self.workers = world.size
        self.worker = world.rank
        sizes = [len(one.parameters) for one in self.parts] or [0]
        self.places = side_by_side(sizes)  # of this rank's part of each fragment, in `delta`
        self.delta = np.zeros(sum(sizes), np.float32)
        # With --fragments, the replica's own parameters when the fragment under way began.
        self.begun = np.zeros(max(sizes) if job.outer.fragments > 1 else 0, np.float32)
        self.outer_exchange = job.new_exchange(rail_comm, self.places)
        # For checkpoints: updates; fragments and steps between two, if one is under way; number of norms; norms.
        self.history = np.zeros(4 + self.clipping.norms.maxlen if replica.rank == 0 else 0, np.float32)

    def _new_optimizers(self, job):
        self.squares = EarlySum(self.comm, len(self.buckets))
        wait(self.node.meet())  # then the leader has filled the parameters
        # The pad depends on the number of ranks, the fragments do not.
        fragments = cut(job.count or len(self.parameters), self.outer.fragments)
        fragments[-1] = (fragments[-1][0], len(self.parameters))
        has_rail = job.world.rank < self.rail_count
        parts = [cut_range(*fragment, self.rail_count)[job.world.rank] for fragment in fragments if has_rail]
        self.parts = [self._part(job, *part) for part in parts]

    def _part(self, job, start, stop):
        """Return the global parameters and the velocity of a range, and AdamW for the replica's own parameters."""
        more = {"velocity": np.zeros(stop - start, np.float32)}
        return Updated(start, self.parameters[start:stop].copy(), job.new_optimizer(start, stop), more)

    def state(self):
        return self.parts

    def errors(self):
        return self.outer_exchange.errors

    def progress(self):
        super().progress()
        self._start_piece()
        self.outer_exchange.engine.progress()

    def clip(self, squares):
        norm = float(np.float32(self.factor * math.sqrt(squares)))  # float32, so that `history` holds it
        norm, scale = self.clipping.scale(norm * norm)
        return norm, None if scale is None else self.factor * scale

    def update(self, lr):
        norm = super().update(lr)
        self.step += 1
        position = self.step % self.period
        if position == 0:
            self._mix()
            self._begin()
        self._start_piece()  # unless a kernel has come before
        if self._under_way():
            self.next_piece = cut_range(*self.places[self.travelling], self.pieces)[position]
        if self.outer.fragments == 1:
            self._mix()
        return norm

    def _begin(self):
        self.travelling = self._fragment_of_step()
        with self.tracer.phase("outer"):
            for part, delta, begun in self._under_way():
                own = self.parameters[part.range]
                np.subtract(part.parameters, own, out=delta)
                begun[:] = own[: len(begun)]

    def _under_way(self):
        """Return [(part, delta, begun)] of this rank, for the fragment under way: none without a rail."""
        if self.travelling is None or not self.parts:
            return []
        part = self.parts[self.travelling]
        return [(part, self.delta[slice(*self.places[self.travelling])], self.begun[: len(part.parameters)])]

    def _start_piece(self):
        """Start to sum the next piece over the replicas. Before the next step, it would delay the ranks' meeting."""
        if self.next_piece is not None:
            self.outer_exchange.engine.start(self.outer_exchange.allreduce(self.delta, *self.next_piece))
            self.next_piece = None

    def _finish(self):
        self._start_piece()
        self.outer_exchange.engine.finish()

    def _mix(self):
        """Wait for the fragment under way, if any, and make its outer step; local = global + own steps since."""
        if self.travelling is None:
            return
        with self.tracer.phase("allreduce", bytes=self.parameters.nbytes // self.outer.fragments):
            self._finish()
        with self.tracer.phase("outer"):
            for part, delta, begun in self._under_way():
                self._outer_step(part, delta)
                own = self.parameters[part.range]
                if len(begun):
                    own -= begun
                    own += part.parameters
                else:
                    own[:] = part.parameters
                part.optimizer.parameters_changed()
            self.travelling = None
        with self.tracer.phase("wait"):
            wait(self.node.meet())

    def _outer_step(self, part, delta):
        """Make the outer step of a range from the sum of its changes over the replicas."""
        velocity = part.more["velocity"]
        delta /= self.replicas
        velocity *= self.outer.momentum
        velocity += delta
        delta += self.outer.momentum * velocity
        delta *= self.outer.lr
        np.subtract(part.parameters, delta, out=part.parameters)

    @contextmanager
    def evaluated(self):
        self._swap()
        yield
        self._swap()

    def _swap(self):
        """Exchange the global parameters and the replica's own ones in place."""
        self._finish()
        wait(self.node.meet())
        for part in self.parts:
            own = self.parameters[part.range]
            part.parameters[:], own[:] = own.copy(), part.parameters.copy()
        wait(self.node.meet())

    def own_arrays(self):
        self._finish()
        if len(self.history):
            under_way = (0, 0) if self.travelling is None else (self.outer.fragments, self.period)
            norms = self.clipping.norms
            found = [self.parts[0].optimizer.step, *under_way, len(norms), *norms]
            self.history[: len(found)] = found
            yield f"{self.prefix}history", 0, self.history
        for part in self.parts:
            yield f"{self.prefix}parameters", part.start, self.parameters[part.range]
            for start, m, v in part.optimizer.moments():
                yield f"{self.prefix}m", start, m
                yield f"{self.prefix}v", start, v
        if self.parts and self.outer.fragments > 1:
            fragment = self._fragment_of_step()
            part = self.parts[fragment]
            yield f"{self.prefix}delta", part.start, self.delta[slice(*self.places[fragment])]
            yield f"{self.prefix}begun", part.start, self.begun[: len(part.parameters)]

    def _fragment_of_step(self):
        """Return the number of the fragment that travels after this step, unless none does."""
        return self.step // self.period % self.outer.fragments

    def resumed(self):
        updates, fragments, period, count, *norms = self.comm.bcast(self.history).tolist()
        for part in self.parts:
            part.optimizer.step = int(updates)
        self.clipping.norms.clear()
        self.clipping.remember(norms[: int(count)])
        if (fragments, period) == (self.outer.fragments, self.period):
            self.travelling = self._fragment_of_step()
        wait(self.node.meet())
