"""What every strategy is given, and the one method it must have."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

from gpt2.optimizer import AdamW


@dataclass(frozen=True)
class Job:
    """What a strategy works with.

    parameters, gradients: the flat float32 buffers of this rank, (size,), size a multiple of comm.size;
    new_optimizer(start, stop): an AdamW with state for that range alone; sum_of_squares(flat): a float;
    max_norm: clip the global norm to it, 0 never; tracer.phase(name, bytes=, root=): times what is inside;
    server: "colocated" or "dedicated", for the strategy that has a server.
    """

    comm: MPI.Intracomm
    parameters: np.ndarray
    gradients: np.ndarray
    new_optimizer: Callable[[int, int], AdamW]
    sum_of_squares: Callable[[np.ndarray], float]
    max_norm: float
    tracer: object
    server: str


class Strategy:
    """How gradients become updated parameters on every rank: one subclass a file.

    `workers` ranks compute gradients; this rank is number `worker` of them, or None if it computes nothing.
    """

    def __init__(self, job: Job):
        self.comm, self.tracer = job.comm, job.tracer
        self.parameters, self.gradients = job.parameters, job.gradients
        self.sum_of_squares, self.max_norm = job.sum_of_squares, job.max_norm
        self.workers, self.worker = job.comm.size, job.comm.rank

    def gradients_final(self, start: int, stop: int) -> None:
        """Called during the last micro-step's backward: gradients [start, stop) will not change any more."""

    def update(self, lr: float) -> float:
        """Exchange and update: on return every rank holds the same new parameters. Returns, on rank 0 at least,
        the global norm of the gradients before clipping."""
        raise NotImplementedError
