"""Base class for strategies that call MPI's collectives on whole vectors.

`comm` is a WireComm (dist/host/wire_comm.py), or a DeviceComm on GPUs: Reduce, Allreduce, Reduce_scatter_block, Bcast
and Allgather of float32 vectors in place. A WireComm adds with --op and sends in the format of --wire. Rounded
parameters cannot accumulate small updates, so with rounding each rank keeps float32 masters of its range.
"""

from strategies.base import Strategy, Updated
from strategies.traits import Traits


class MpiCollectives(Strategy):
    """A subclass calls `take_range` for the range that it updates, and sends it in `distribute_parameters`."""

    traits = Traits(wires=("float32", "bfloat16"), operations=("mpi", "own"))

    def __init__(self, job):
        super().__init__(job)
        self.is_lossy = self.comm.item_bytes < self.parameters.itemsize  # fewer bits on the wire than in float32
        self.masters = self.parameters

    def take_range(self, job, start: int, stop: int) -> None:
        """Make this rank the owner of [start, stop): set up `masters` (stop - start,) float32, and their AdamW."""
        self.own = slice(start, stop)
        self.optimizer = job.new_optimizer(start, stop)
        own = self.parameters[self.own]
        self.masters = own.copy() if self.is_lossy else own

    def update_own(self, gradients, lr: float, scale: float | None) -> None:
        """Update this rank's range with its summed gradients."""
        self.optimizer.update(self.masters, gradients, lr, scale)
        self._use_masters()

    def distribute_parameters(self) -> None:
        """Send this rank's range of the parameters to all ranks, unless all ranks make the same update. Collective."""

    def state(self):
        return [Updated(self.own.start, self.masters, self.optimizer)] if self.optimizer else []

    def resumed(self):
        if self.is_lossy:
            self._use_masters()
            self.distribute_parameters()

    def _use_masters(self):
        if self.optimizer and self.is_lossy:
            self.parameters[self.own] = self.masters
