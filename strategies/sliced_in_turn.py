"""sliced-in-turn: the flat buffer is cut into N slices, and rank r is the server of slice r, one after the other.

    for each r: Reduce(gradients[slice r]) to r;  AdamW on the own slice;  for each r: Bcast(parameters[slice r])

The bytes of reduce-bcast, but each node's port carries its share of them. Each rank holds 1/N of the optimizer
state (2 D / N). The N calls run one after another, so at any moment the port of one root's node is full and the others
idle: the control beside `sliced`, which has all of them under way.
"""

from dist.cost.memory import Memory
from dist.cost.messages import NORM, in_turn, rooted_calls
from dist.mpi import MPI
from dist.ranges import cut
from strategies.base import OnGpus
from strategies.calls import OfCalls


class SlicedInTurn(OfCalls):
    name, line = "sliced-in-turn", "a Reduce and a Bcast for each rank's slice, in turn"
    memory = Memory(optimizer="2/N")
    on_gpus = OnGpus()

    @staticmethod
    def messages(setting):
        return in_turn(*rooted_calls(setting, "reduce"), NORM, *rooted_calls(setting, "bcast"))

    def __init__(self, job):
        super().__init__(job)
        self.slices = cut(self.parameters.shape[0], self.comm.size)
        self._update_own(job, *self.slices[self.comm.rank])

    def update(self, lr):
        with self.tracer.phase("reduce", bytes=self.gradients.nbytes):
            for root, bounds in enumerate(self.slices):
                sent = self.wire.packed(self.gradients, *bounds)
                own = (MPI.IN_PLACE, sent) if root == self.comm.rank else (sent, None)
                with self.tracer.call("reduce", sent.nbytes, root):
                    self.comm.Reduce(*own, self.operation, root=root)
            self.wire.arrived(self.gradients, self.own.start, self.own.stop)
        with self.tracer.phase("allreduce", bytes=8):
            squares = self.comm.allreduce(self.sum_of_squares(self.gradients[self.own]))
        with self.tracer.phase("update"):
            norm, scale = self.clipping.scale(squares)
            self.optimizer.update(self.updated, self.gradients[self.own], lr, scale)
        with self.tracer.phase("bcast", bytes=self.parameters.nbytes):
            self._share()
        return norm

    def _share(self):
        self._round_own()
        for root, bounds in enumerate(self.slices):
            shared = self.wire.gathered(self.parameters, *bounds)
            with self.tracer.call("bcast", shared.nbytes, root):
                self.comm.Bcast(shared, root=root)
            self.wire.arrived(self.parameters, *bounds)
