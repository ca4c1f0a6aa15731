"""scripts/train.py with something wrong on one rank, for trying the verdict: see fault_suite.py.

    mpirun -n 5 python tests/suites/faulty_train.py slow-rank:3 --steps 40 --out runs/slow

slow-rank:R        rank R computes at half speed
starved-rank:R     each batch comes 0.2 s late to rank R
stalling-rank:R    rank R stands still for a second, once in 20 steps
small-messages     gradients are exchanged tensor by tensor, in as many calls as a large model has tensors
nothing            just training

What is slow sleeps, so that it takes no core from the other ranks on this machine.
"""

import sys
import time

import mpi4py

mpi4py.rc(initialize=False, finalize=True)  # as in train.py

from mpi4py import MPI

from dist.ranges import cut
from gpt2.data.windows import Windows
from gpt2.model import GPT2
from scripts import train
from strategies import STRATEGIES, Strategy
from tests.suites.faults.suite import take_fault

LATE_S, STALL_S, STALL_EVERY = 0.2, 1.0, 20
TENSORS = 148  # of GPT-2 124M


def main():
    fault, *ranks = take_fault(FAULTS, "FAULT[:R]")
    FAULTS[fault](int(ranks[0]) if ranks else -1)
    train.main()


def slow_rank(rank: int) -> None:
    for name in ("forward", "backward"):
        setattr(GPT2, name, twice_as_long(getattr(GPT2, name), rank))


def twice_as_long(function, rank: int):
    def slow(*arguments):
        start = time.perf_counter()
        result = function(*arguments)
        if MPI.COMM_WORLD.rank == rank:
            time.sleep(time.perf_counter() - start)
        return result

    return slow


def starved_rank(rank: int) -> None:
    read = Windows.read

    def late(*arguments):
        if MPI.COMM_WORLD.rank == rank:
            time.sleep(LATE_S)
        return read(*arguments)

    Windows.read = late


def stalling_rank(rank: int) -> None:
    forward, steps = GPT2.forward, iter(range(1, sys.maxsize))

    def stalling(*arguments):
        if MPI.COMM_WORLD.rank == rank and next(steps) % STALL_EVERY == 0:
            time.sleep(STALL_S)
        return forward(*arguments)

    GPT2.forward = stalling


def small_messages(_: int) -> None:
    STRATEGIES["allreduce"] = TensorByTensor


def nothing(_: int) -> None:
    """A healthy run."""


class TensorByTensor(Strategy):
    """One MPI_Allreduce after another; AdamW everywhere."""

    name = "allreduce"

    def __init__(self, job):
        super().__init__(job)
        self.optimizer = job.new_optimizer(0, len(self.parameters))

    def update(self, lr):
        for start, stop in cut(len(self.gradients), TENSORS):
            with self.tracer.phase("allreduce", bytes=4 * (stop - start)):
                self.comm.Allreduce(MPI.IN_PLACE, self.gradients[start:stop])
        with self.tracer.phase("update"):
            norm, scale = self.clipping.scale(self.sum_of_squares(self.gradients))
            self.optimizer.update(self.parameters, self.gradients, lr, scale)
        return norm


FAULTS = {
    "slow-rank": slow_rank,
    "starved-rank": starved_rank,
    "stalling-rank": stalling_rank,
    "small-messages": small_messages,
    "nothing": nothing,
}

if __name__ == "__main__":
    main()
