"""sliced: the flat buffer is cut into N slices, and rank r is the server of slice r.

    for each r: Reduce(gradients[slice r]) to r;  AdamW on the own slice;  for each r: Bcast(parameters[slice r])

The bytes of reduce-bcast, but each node's port carries its share of them. Each rank holds 1/N of the optimizer
state (2 D / N). The N calls run one after another, so a port idles while others work. Use it where only rooted calls
are fast.
"""

from dist.cost.memory import Memory
from dist.cost.messages import NORM, in_turn, rooted_calls
from dist.mpi import MPI
from dist.ranges import cut
from strategies.base import OnGpus, Strategy


class Sliced(Strategy):
    name, line = "sliced", "a Reduce and a Bcast for each rank's slice"
    auto = ("host",)
    memory = Memory(optimizer="2/N")
    on_gpus = OnGpus()

    @staticmethod
    def messages(setting):
        return in_turn(*rooted_calls(setting, "reduce"), NORM, *rooted_calls(setting, "bcast"))

    def __init__(self, job):
        super().__init__(job)
        self.slices = cut(len(self.parameters), self.comm.size)
        self.own = slice(*self.slices[self.comm.rank])
        self.optimizer = job.new_optimizer(self.own.start, self.own.stop)

    def update(self, lr):
        with self.tracer.phase("reduce", bytes=self.gradients.nbytes):
            for root, (start, stop) in enumerate(self.slices):
                if root == self.comm.rank:
                    self.comm.Reduce(MPI.IN_PLACE, self.gradients[start:stop], root=root)
                else:
                    self.comm.Reduce(self.gradients[start:stop], None, root=root)
        with self.tracer.phase("allreduce", bytes=8):
            squares = self.comm.allreduce(self.sum_of_squares(self.gradients[self.own]))
        with self.tracer.phase("update"):
            norm, scale = self.clipping.scale(squares)
            self.optimizer.update(self.parameters[self.own], self.gradients[self.own], lr, scale)
        with self.tracer.phase("bcast", bytes=self.parameters.nbytes):
            for root, (start, stop) in enumerate(self.slices):
                self.comm.Bcast(self.parameters[start:stop], root=root)
        return norm
