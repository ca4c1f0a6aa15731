"""reduce-scatter: every rank gets the gradient sum of one block and updates it; all ranks gather all blocks.

    Reduce_scatter_block(gradients) -> own block;  AdamW on the own block;  Allgather(parameters)

The optimizer state is sharded (ZeRO-1, Rajbhandari et al. 2020): 2 D / N per rank, and D / N for the block's sum; D / N
more for float32 masters with --wire bfloat16. Each rank sends and receives 2 (N-1)/N D, the least possible with one
rank per node. The size of the buffers is a multiple of N, so all blocks have the same size.

--overlap works over NCCL only: there Sharded replaces this class, and makes these calls for each bucket.
"""

import numpy as np

from dist.cost.memory import Memory
from dist.cost.messages import NORM, in_turn
from dist.gpu.collectives import DeviceCollectives
from dist.mpi import MPI
from strategies.mpi_collectives import MpiCollectives
from strategies.sharded import Sharded
from strategies.traits import OnGpus


def messages(setting):
    reduce_scatter = setting.call("reduce_scatter_block", setting.padded)
    return in_turn(reduce_scatter, NORM, setting.call("allgather", setting.padded))


class ReduceScatter(MpiCollectives):
    name = "reduce-scatter"
    traits = MpiCollectives.traits.changed(
        line="Reduce_scatter_block, Allgather",
        auto=("host", "gpus"),
        memory=Memory(gradients="1 + 1/N", optimizer="2/N"),
        on_gpus=OnGpus({"float32": DeviceCollectives}, overlapped=Sharded),
        messages=messages,
    )

    def __init__(self, job):
        super().__init__(job)
        block = self.parameters.shape[0] // self.comm.size
        self.block_sum = np.zeros_like(self.gradients[:block])  # in host memory or on a GPU, as the gradients are
        self.take_range(job, self.comm.rank * block, (self.comm.rank + 1) * block)

    def update(self, lr):
        with self.tracer.phase("reduce_scatter", bytes=self.gradients.nbytes):
            self.comm.Reduce_scatter_block(self.gradients, self.block_sum)
        with self.tracer.phase("allreduce", bytes=8):
            squares = self.comm.allreduce(self.sum_of_squares(self.block_sum))
        with self.tracer.phase("update"):
            norm, scale = self.clipping.scale(squares)
            self.update_own(self.block_sum, lr, scale)
        with self.tracer.phase("allgather", bytes=self.parameters.nbytes):
            self.distribute_parameters()
        return norm

    def distribute_parameters(self):
        self.comm.Allgather(MPI.IN_PLACE, self.parameters)
