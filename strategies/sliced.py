"""sliced: the flat buffer is cut into N slices, and rank r is the server of slice r; all calls are in flight at once.

    for each r: Ireduce(gradients[slice r]) to r;  AdamW on the own slice;  for each r: Ibcast(parameters[slice r])

It sends as many bytes as reduce-bcast, spread over all nodes' ports and both directions: while a rank receives its
slice it sends its gradients of the other slices. Each rank holds the optimizer state of its slice, 2 D / N if nodes
have equally many ranks. All updates wait for all slices, because they need the norm of the whole gradient. The calls
are in dist/host/rooted.py.

--overlap: each bucket that backward finishes is sliced like this, and the broadcasts go on during the next forward.

On GPUs SlicedInTurn runs instead: NCCL's calls run one after another on their stream."""

from dist.cost.memory import Memory
from dist.cost.messages import NORM, in_turn, rooted_calls_together
from dist.cost.overlap import of_buckets
from dist.host.rooted import RootedExchange
from strategies.sharded import Sharded
from strategies.sliced_in_turn import SlicedInTurn
from strategies.traits import OnGpus


def messages(setting):
    return in_turn(rooted_calls_together(setting, "ireduce"), NORM, rooted_calls_together(setting, "ibcast"))


class Sliced(Sharded):
    name = "sliced"
    traits = Sharded.traits.changed(
        line="a Reduce and a Bcast for each rank's slice, all under way at once",
        operations=("mpi", "own"),
        error_feedback=False,
        auto=("host",),
        memory=Memory(optimizer="2/ML"),
        host_exchange=RootedExchange,
        on_gpus=OnGpus(form=SlicedInTurn),
        messages=messages,
        overlap=lambda training: of_buckets(training, beside=1.0),  # backward, and the next forward
    )
    phases = "reduce", "bcast"

    def _new_exchange(self, job):
        nodes = [place["node"] for place in job.world.places]
        return job.new_exchange(self.comm, self.buckets, placement=nodes, operation=self.comm.operation)
