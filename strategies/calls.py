"""What the strategies share that call MPI's collectives: what adds, and in which format vectors travel.

    float32:   MPI_SUM, or an operation of our own (dist/host/operation.py), on the vectors themselves
    bfloat16:  the own operation alone, on copies of half the bytes; it rounds each sum that it makes

Where what travels is rounded, a rank that updates parameters holds them in float32 beside those that it shares, as
updates must add up unrounded.
"""

from strategies.base import Strategy, Updated


class OfCalls(Strategy):
    """`whole`: the bounds of the flat buffer. A subclass sets `own`, and shares its parameters in `_share`."""

    wires, operations = ("float32", "bfloat16"), ("mpi", "own")

    def __init__(self, job):
        super().__init__(job)
        self.whole = (0, self.parameters.shape[0])
        self.operation, self.wire = job.operation, job.new_wire(self.whole[1])

    def _update_own(self, job, start: int, stop: int) -> None:
        """Make this rank the one that updates [start, stop): in `updated`, (stop - start,) float32."""
        self.own, self.optimizer = slice(start, stop), job.new_optimizer(start, stop)
        own = self.parameters[self.own]
        self.updated = own.copy() if self.wire.rounds else own

    def _round_own(self) -> None:
        """Bring this rank's own parameters to what the others will receive of them."""
        if self.wire.rounds:
            self.parameters[self.own] = self.updated
        self.wire.rounded(self.parameters, self.own.start, self.own.stop)

    def state(self):
        return [Updated(self.own.start, self.updated, self.optimizer)] if self.optimizer else []

    def resumed(self):
        if self.wire.rounds:
            self._share()

    def _share(self) -> None:
        """Bring everyone's own parameters to all ranks. Collective."""
