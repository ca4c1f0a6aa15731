"""allreduce: the sum of all gradients on every rank, and every rank does the same update.

    Allreduce(gradients);  AdamW everywhere

Each rank holds all optimizer state (2 D) and repeats the whole update. 2 (N-1)/N D in and out of each rank if the
library picks a ring, or reduce-scatter and all-gather. It is what PyTorch's DDP does; use it where the site tuned it.

--overlap, over NCCL: each bucket that backward finishes is a call of its own, so Replicated makes them, not this page.
"""

from dist.gpu.calls import AllreduceCall
from dist.mpi import MPI
from strategies.base import OnGpus
from strategies.calls import OfCalls
from strategies.replicated import Replicated


class Allreduce(OfCalls):
    name, line = "allreduce", "Allreduce"
    shares_sums = True
    auto = ("host", "gpus")
    on_gpus = OnGpus({"float32": AllreduceCall}, overlapped=Replicated)

    @staticmethod
    def messages(setting):
        return setting.call("allreduce", setting.vector)

    def __init__(self, job):
        super().__init__(job)
        self.optimizer, self.updated = job.new_optimizer(*self.whole), self.parameters

    def update(self, lr):
        with self.tracer.phase("allreduce", bytes=self.gradients.nbytes):
            self.comm.Allreduce(MPI.IN_PLACE, self.wire.packed(self.gradients, *self.whole), self.operation)
            self.wire.arrived(self.gradients, *self.whole)
        with self.tracer.phase("update"):
            norm, scale = self.clipping.scale(self.sum_of_squares(self.gradients))
            self.optimizer.update(self.parameters, self.gradients, lr, scale)
        return norm
