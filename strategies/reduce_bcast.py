"""reduce-bcast: rank 0 is the server. All gradients are summed there, updated there, and the parameters come back.

    Reduce(gradients) to rank 0;  rank 0: clip, AdamW;  Bcast(parameters) from rank 0

Rank 0 alone holds optimizer state (2 D). Everything goes through its node's port: with a flat Reduce and Bcast
(N - ranks on that node) D in and as much out, with trees log2(N) times D. Use it to see that, or where N is small.
With server "dedicated" rank 0 computes no gradients and N-1 ranks share the batch.
"""

from dist.cost.memory import Memory
from dist.cost.messages import in_turn
from dist.mpi import MPI
from strategies.base import OnGpus
from strategies.calls import OfCalls

SERVER = 0


class ReduceBcast(OfCalls):
    name, line = "reduce-bcast", "Reduce to a server, Bcast from it"
    servers = ("colocated", "dedicated")
    auto = ("host",)
    memory = Memory(on_server=True)
    on_gpus = OnGpus()

    @staticmethod
    def messages(setting):
        return in_turn(setting.call("reduce", setting.vector), setting.call("bcast", setting.vector))

    def __init__(self, job):
        super().__init__(job)
        self.serves = self.comm.rank == SERVER
        if self.serves:
            self._update_own(job, *self.whole)
        if job.server == "dedicated":
            self.workers = self.comm.size - 1
            self.worker = None if self.serves else self.comm.rank - 1

    def update(self, lr):
        if self.worker is None:
            self.gradients.fill(0.0)  # the sum comes in place, and the server adds nothing of its own
        with self.tracer.phase("reduce", bytes=self.gradients.nbytes, root=SERVER):
            sent = self.wire.packed(self.gradients, *self.whole)
            if self.serves:
                self.comm.Reduce(MPI.IN_PLACE, sent, self.operation, root=SERVER)
                self.wire.arrived(self.gradients, *self.whole)
            else:
                self.comm.Reduce(sent, None, self.operation, root=SERVER)
        norm = self._update_on_server(lr)
        with self.tracer.phase("bcast", bytes=self.parameters.nbytes, root=SERVER):
            self._share()
        return norm

    def _update_on_server(self, lr):
        if not self.serves:
            return None
        with self.tracer.phase("update"):
            norm, scale = self.clipping.scale(self.sum_of_squares(self.gradients))
            self.optimizer.update(self.updated, self.gradients, lr, scale)
        return norm

    def _share(self):
        if self.serves:
            self._round_own()
        self.comm.Bcast(self.wire.gathered(self.parameters, *self.whole), root=SERVER)
        self.wire.arrived(self.parameters, *self.whole)
