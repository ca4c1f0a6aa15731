"""reduce-bcast: rank 0 is the server. It sums all gradients, updates the parameters, and sends them to all ranks.

    Reduce(gradients) to rank 0;  rank 0: clip, AdamW;  Bcast(parameters) from rank 0

Only rank 0 holds optimizer state (2 D; with --wire bfloat16 also masters, D). The port of its node carries about N D
each way with a flat algorithm, log2(N) D with a binomial tree, 2 to 3 D with MPICH's algorithms for long vectors. With
server "dedicated" rank 0 computes no gradients, and N-1 ranks share the batch.
"""

from dist.cost.memory import Memory
from dist.cost.messages import in_turn
from dist.mpi import MPI
from strategies.mpi_collectives import MpiCollectives
from strategies.traits import OnGpus

SERVER = 0


class ReduceBcast(MpiCollectives):
    name = "reduce-bcast"
    traits = MpiCollectives.traits.changed(
        line="Reduce to a server, Bcast from it",
        servers=("colocated", "dedicated"),
        auto=("host",),
        memory=Memory(on_server=True),
        on_gpus=OnGpus(),
        messages=lambda setting: in_turn(setting.call("reduce", setting.vector), setting.call("bcast", setting.vector)),
    )

    def __init__(self, job):
        super().__init__(job)
        self.serves = self.comm.rank == SERVER
        if self.serves:
            self.take_range(job, 0, len(self.parameters))
        if job.server == "dedicated":
            self.workers = self.comm.size - 1
            self.worker = None if self.serves else self.comm.rank - 1

    def update(self, lr):
        if self.worker is None:
            self.gradients.fill(0.0)  # a dedicated server adds nothing to the sum
        with self.tracer.phase("reduce", bytes=self.gradients.nbytes, root=SERVER):
            if self.serves:
                self.comm.Reduce(MPI.IN_PLACE, self.gradients, root=SERVER)
            else:
                self.comm.Reduce(self.gradients, None, root=SERVER)
        norm = None
        if self.serves:
            with self.tracer.phase("update"):
                norm, scale = self.clipping.scale(self.sum_of_squares(self.gradients))
                self.update_own(self.gradients, lr, scale)
        with self.tracer.phase("bcast", bytes=self.parameters.nbytes, root=SERVER):
            self.distribute_parameters()
        return norm

    def distribute_parameters(self):
        self.comm.Bcast(self.parameters, root=SERVER)
