"""reduce-scatter: every rank gets the sum of one block, updates it, and the blocks are gathered on all.

    Reduce_scatter_block(gradients) -> own block;  AdamW on the own block;  Allgather(parameters)

The optimizer state is sharded (ZeRO-1, Rajbhandari et al. 2020): 2 D / N a rank, and D / N for the block's sum.
Each rank sends and receives 2 (N-1)/N D, the least there is for one rank a node. The buffers' size is a multiple of the
ranks, so all blocks are alike.

--overlap, over NCCL: each bucket that backward finishes is a call of its own, so Sharded makes them, not this page.
"""

import numpy as np

from dist.cost.memory import Memory
from dist.cost.messages import NORM, in_turn
from dist.gpu.calls import DeviceCalls
from dist.mpi import MPI
from strategies.base import OnGpus
from strategies.calls import OfCalls
from strategies.sharded import Sharded


class ReduceScatter(OfCalls):
    name, line = "reduce-scatter", "Reduce_scatter_block, Allgather"
    auto = ("host", "gpus")
    memory = Memory(gradients="1 + 1/N", optimizer="2/N")
    on_gpus = OnGpus({"float32": DeviceCalls}, overlapped=Sharded)

    @staticmethod
    def messages(setting):
        halves = [setting.call(collective, setting.padded) for collective in ("reduce_scatter_block", "allgather")]
        return in_turn(halves[0], NORM, halves[1])

    def __init__(self, job):
        super().__init__(job)
        block = self.parameters.shape[0] // self.comm.size
        self.block, self.block_wire = (0, block), job.new_wire(block)
        self.block_sum = np.zeros_like(self.gradients[:block])  # where they lie: in host memory, or on a GPU
        self._update_own(job, self.comm.rank * block, (self.comm.rank + 1) * block)

    def update(self, lr):
        with self.tracer.phase("reduce_scatter", bytes=self.gradients.nbytes):
            sent, received = (
                self.wire.packed(self.gradients, *self.whole),
                self.block_wire.gathered(self.block_sum, *self.block),
            )
            self.comm.Reduce_scatter_block(sent, received, self.operation)
            self.block_wire.arrived(self.block_sum, *self.block)
        with self.tracer.phase("allreduce", bytes=8):
            squares = self.comm.allreduce(self.sum_of_squares(self.block_sum))
        with self.tracer.phase("update"):
            norm, scale = self.clipping.scale(squares)
            self.optimizer.update(self.updated, self.block_sum, lr, scale)
        with self.tracer.phase("allgather", bytes=self.parameters.nbytes):
            self._share()
        return norm

    def _share(self):
        self._round_own()
        self.comm.Allgather(MPI.IN_PLACE, self.wire.gathered(self.parameters, *self.whole))
        self.wire.arrived(self.parameters, *self.whole)
