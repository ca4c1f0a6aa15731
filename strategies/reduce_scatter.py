"""reduce-scatter: every rank gets the sum of one block, updates it, and the blocks are gathered on all.

    Reduce_scatter_block(gradients) -> own block;  AdamW on the own block;  Allgather(parameters)

The optimizer state is sharded (ZeRO-1, Rajbhandari et al. 2020): 2 D / N a rank, and D / N for the block's sum.
Each rank sends and receives 2 (N-1)/N D, the least there is for one rank a node. The buffers' size is a multiple of the
ranks, so all blocks are alike.
"""

import numpy as np
from mpi4py import MPI

from strategies.base import Strategy


class ReduceScatter(Strategy):
    def __init__(self, job):
        super().__init__(job)
        block = len(self.parameters) // self.comm.size
        self.block_sum = np.zeros_like(self.gradients[:block])  # where they lie: in host memory, or on a GPU
        self.own = slice(self.comm.rank * block, (self.comm.rank + 1) * block)
        self.optimizer = job.new_optimizer(self.own.start, self.own.stop)

    def update(self, lr):
        with self.tracer.phase("reduce_scatter", bytes=self.gradients.nbytes):
            self.comm.Reduce_scatter_block(self.gradients, self.block_sum)
        with self.tracer.phase("allreduce", bytes=8):
            squares = self.comm.allreduce(self.sum_of_squares(self.block_sum))
        with self.tracer.phase("update"):
            norm, scale = self.clipping.scale(squares)
            self.optimizer.update(self.parameters[self.own], self.block_sum, lr, scale)
        with self.tracer.phase("allgather", bytes=self.parameters.nbytes):
            self.comm.Allgather(MPI.IN_PLACE, self.parameters)
        return norm
