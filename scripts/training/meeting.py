"""The end of a step, where all ranks meet: they tell each other their losses and times, and what a signal asked for."""

import math
from typing import NamedTuple

from dist.waiting import gather_everywhere
from dist.world import end_with_one_line
from scripts.training.signals import Signals


class Meeting(NamedTuple):
    """What all ranks know when they have met, the same on each of them.

    loss: of the global batch, the mean. exposed_s: seconds of exchange that nothing hid, the mean over the workers.
    compute_s: for each rank, the seconds that its gradients took, nan for a server. asked: the most that a signal asked
    of any rank. written: for each rank, how much of its part of a checkpoint is on disk (Checkpointing.written).
    """

    loss: float
    exposed_s: float
    compute_s: list[float]
    asked: int
    written: list[int]


class MeetingPoint:
    """Where all ranks meet once a step, with one small all-gather.

    worker: this rank's Worker or Server. workers: how many ranks are workers. checkpoints: a Checkpointing, which
    completes a checkpoint once all ranks know that all of them have written their parts.
    """

    def __init__(self, comm, worker, workers: int, signals: Signals, checkpoints):
        self.comm, self.worker, self.workers = comm, worker, workers
        self.signals, self.checkpoints = signals, checkpoints

    def meet(self, loss_part: float) -> Meeting:
        """loss_part: of the mean loss, what this rank's windows add. Collective."""
        own = (loss_part, *self.worker.seconds(), self.signals.asked(), self.checkpoints.written())
        loss, exposed_s, compute_s, asked, written = gather_everywhere(self.comm, *own).T
        meeting = Meeting(
            loss=math.fsum(loss),  # exact, so all ranks get the same bits
            exposed_s=math.fsum(exposed_s) / self.workers,
            compute_s=compute_s.tolist(),
            asked=int(asked.max()),
            written=written.astype(int).tolist(),
        )
        self.checkpoints.settle(meeting.written)
        return meeting


def end_if_diverged(comm, step: int, loss: float) -> None:
    """End the job if the loss is no number any more. All ranks have the same loss, so all of them come here."""
    if not math.isfinite(loss):
        text = f"the loss of step {step} is {loss}: lower --lr, raise --warmup, or check the data"
        end_with_one_line(comm, text)
