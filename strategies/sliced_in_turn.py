"""sliced-in-turn: the flat buffer is cut into N slices, and rank r is the root of slice r; one call runs at a time.

    for each r: Reduce(gradients[slice r]) to r;  AdamW on the own slice;  for each r: Bcast(parameters[slice r])

It sends as many bytes as reduce-bcast, spread over the nodes' ports. Each rank holds 1/N of the optimizer state,
2 D / N. The N calls run one after another, so at any moment the port of one root's node is full and the others are
idle. Compare it with `sliced`, which has all calls in flight at once.
"""

from dist.cost.memory import Memory
from dist.cost.messages import NORM, in_turn, rooted_calls
from dist.mpi import MPI
from dist.ranges import cut
from strategies.mpi_collectives import MpiCollectives
from strategies.traits import OnGpus


class SlicedInTurn(MpiCollectives):
    name = "sliced-in-turn"
    traits = MpiCollectives.traits.changed(
        line="a Reduce and a Bcast for each rank's slice, in turn",
        memory=Memory(optimizer="2/N"),
        on_gpus=OnGpus(),
        messages=lambda setting: in_turn(*rooted_calls(setting, "reduce"), NORM, *rooted_calls(setting, "bcast")),
    )

    def __init__(self, job):
        super().__init__(job)
        slices = cut(self.parameters.shape[0], self.comm.size)
        self.slices = [slice(start, stop) for start, stop in slices]
        self.take_range(job, *slices[self.comm.rank])

    def update(self, lr):
        with self.tracer.phase("reduce", bytes=self.gradients.nbytes):
            for root, part in enumerate(self.slices):
                gradients = self.gradients[part]
                if root == self.comm.rank:
                    self.comm.Reduce(MPI.IN_PLACE, gradients, root=root)
                else:
                    self.comm.Reduce(gradients, None, root=root)
        with self.tracer.phase("allreduce", bytes=8):
            squares = self.comm.allreduce(self.sum_of_squares(self.gradients[self.own]))
        with self.tracer.phase("update"):
            norm, scale = self.clipping.scale(squares)
            self.update_own(self.gradients[self.own], lr, scale)
        with self.tracer.phase("bcast", bytes=self.parameters.nbytes):
            self.distribute_parameters()
        return norm

    def distribute_parameters(self):
        for root, part in enumerate(self.slices):
            self.comm.Bcast(self.parameters[part], root=root)
