"""Base class for strategies that call MPI's collectives on whole vectors.

`comm` is mpi4py's communicator, or has its calls for float32 vectors and rounds them to the wire format itself
(dist/host/wire_comm.py). Rounded parameters cannot accumulate small updates, so the rank that updates them then keeps
float32 masters of its own.
"""

from strategies.base import Strategy, Updated
from strategies.traits import Traits


class MpiCollectives(Strategy):
    """A subclass calls `update_range` for the range it updates, and sends its parameters in `share`."""

    traits = Traits(wires=("float32", "bfloat16"), operations=("mpi", "own"))

    def __init__(self, job):
        super().__init__(job)
        self.rounds = self.comm.item_bytes < self.parameters.itemsize
        self.masters = self.parameters

    def update_range(self, job, start: int, stop: int) -> None:
        """Make this rank update [start, stop): `masters` (stop - start,) float32, with an AdamW."""
        self.own = slice(start, stop)
        self.optimizer = job.new_optimizer(start, stop)
        own = self.parameters[self.own]
        self.masters = own.copy() if self.rounds else own

    def update_own(self, gradients, lr: float, scale: float | None) -> None:
        """Update this rank's range by its summed gradients."""
        self.optimizer.update(self.masters, gradients, lr, scale)
        self._use_masters()

    def share(self) -> None:
        """Send this rank's own parameters to all ranks. Collective."""

    def state(self):
        return [Updated(self.own.start, self.masters, self.optimizer)] if self.optimizer else []

    def resumed(self):
        if self.rounds:
            self._use_masters()
            self.share()

    def _use_masters(self):
        if self.optimizer and self.rounds:
            self.parameters[self.own] = self.masters
