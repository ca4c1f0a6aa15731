"""allreduce: every rank receives the sum of all gradients, and makes the same update.

    Allreduce(gradients);  AdamW on every rank

Each rank holds all optimizer state (2 D) and repeats the whole update. A rank sends and receives 2 (N-1)/N D if the
library picks a ring, or reduce-scatter and all-gather. PyTorch's DDP does the same. Use it if your MPI is tuned for it.

--overlap works over NCCL only: there Replicated replaces this class, and makes one call for each bucket.
"""

from dist.gpu.collectives import AllreduceCall
from dist.mpi import MPI
from strategies.mpi_collectives import MpiCollectives
from strategies.replicated import Replicated
from strategies.traits import OnGpus


class Allreduce(MpiCollectives):
    name = "allreduce"
    traits = MpiCollectives.traits.changed(
        line="Allreduce",
        shares_sums=True,
        auto=("host", "gpus"),
        on_gpus=OnGpus({"float32": AllreduceCall}, overlapped=Replicated),
        messages=lambda setting: setting.call("allreduce", setting.vector),
    )

    def __init__(self, job):
        super().__init__(job)
        self.optimizer = job.new_optimizer(0, len(self.parameters))

    def update(self, lr):
        with self.tracer.phase("allreduce", bytes=self.gradients.nbytes):
            self.comm.Allreduce(MPI.IN_PLACE, self.gradients)
        with self.tracer.phase("update"):
            norm, scale = self.clipping.scale(self.sum_of_squares(self.gradients))
            self.optimizer.update(self.parameters, self.gradients, lr, scale)
        return norm
