"""sliced: the flat buffer is cut into N slices, and rank r is the server of slice r, all of them at once.

    for each r: Ireduce(gradients[slice r]) to r;  AdamW on the own slice;  for each r: Ibcast(parameters[slice r])

The bytes of reduce-bcast, spread over all nodes' ports, both ways: while a rank receives its slice it sends its parts
of the others'. Each rank holds the optimizer state of its slice, 2 D / N where nodes are alike. The updates wait for
all slices, as the gradients' norm is that of the whole vector. The calls are dist/host/rooted.py's;
sliced_in_turn.py, the control beside it, makes them one after another.

--overlap: each bucket that backward finishes is sliced so, and the broadcasts go on during the next forward.

On GPUs the form is SlicedInTurn: NCCL knows no calls that are under way together but those that it queues.
"""

from dist.cost.memory import Memory
from dist.cost.messages import NORM, in_turn, rooted_calls_together
from dist.cost.overlap import of_buckets
from dist.host.rooted import RootedExchange
from strategies.base import OnGpus
from strategies.sharded import Sharded
from strategies.sliced_in_turn import SlicedInTurn


class Sliced(Sharded):
    name, line = "sliced", "a Reduce and a Bcast for each rank's slice, all under way at once"
    operations, error_feedback = ("mpi", "own"), False
    phases = "reduce", "bcast"
    auto = ("host",)
    memory = Memory(optimizer="2/ML")
    host_exchange = RootedExchange
    on_gpus = OnGpus(form=SlicedInTurn)

    @staticmethod
    def messages(setting):
        return in_turn(rooted_calls_together(setting, "ireduce"), NORM, rooted_calls_together(setting, "ibcast"))

    @staticmethod
    def overlap(training):
        return of_buckets(training, beside=1.0)  # backward, and the next forward

    def _new_exchange(self, job):
        placement = [place["node"] for place in job.world.places]
        seen = {"placement": placement, "operation": job.operation, "on_call": self.tracer.call}
        return job.new_exchange(self.comm, self.buckets, **seen)
