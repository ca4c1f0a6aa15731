"""The meeting at the end of a step: all ranks exchange their losses, times and requests by signals."""

import math
import resource
from dataclasses import dataclass
from typing import NamedTuple

from dist.waiting import gather_everywhere
from scripts.training.signals import Clock, Signals
from traces.record.steps import SlowSteps

# Once in this many meetings: a call to CUDA's driver takes up to a millisecond, and memory in use changes slowly.
GPU_ASKED_EACH = 16


class RankReports(NamedTuple):
    """The reports of all ranks at the end of a step, the same on every rank. The lists have an entry for each rank."""

    loss: float  # the mean over the global batch
    losses: list[float]  # the rank's part of the loss
    norms: list[float]  # of the gradients that the rank updated with, 0 if unknown or if it skipped the step
    exchange_s: list[float]  # seconds of exposed exchange
    step_s: list[float]  # seconds of the step so far
    compute_s: list[float]  # seconds of computing the rank's gradients, nan for a server
    request: int  # the largest request of a signal or the clock on any rank
    written: list[int]  # see Checkpointing.written
    pipeline_s: list[float] = ()  # seconds of waiting for neighbouring stages
    memory_bytes: list[float] = (0.0,)  # the rank's peak host memory so far
    gpu_bytes: list[float] = (0.0,)  # memory in use on the rank's GPU, as last asked; 0 without a GPU


@dataclass
class MeetingPoint:
    """Lets all ranks meet once a step, in one small all-gather."""

    comm: object
    worker: object  # this rank's Worker or Server
    requesters: list[Signals | Clock]  # they may request a checkpoint or the end
    checkpoints: object  # completes a checkpoint once all ranks know that all have written their parts
    failures: object  # TraceFailures, to warn of failures on any rank
    tracer: object  # keeps steps that took long; all ranks have the same reports, so they keep the same steps
    device: object = None  # the rank's GPU

    def __post_init__(self):
        self.slow_steps = SlowSteps()
        self._met = 0
        self._gpu_bytes = 0

    def meet(self, loss_part: float, norm: float | None) -> RankReports:
        """Exchange reports. Collective.

        loss_part: what this rank's windows add to the mean loss. norm: of the gradients, None if this rank does not
        know the norm or the step was skipped.
        """
        request = max(one.requested() for one in self.requesters)
        own = (loss_part, norm or 0.0, *self.worker.seconds(), request, self.checkpoints.written())
        told = gather_everywhere(self.comm, *own, *self.memory(), self.failures.own()).T.tolist()
        losses, norms, exchange_s, compute_s, step_s, pipeline_s, requests, written, memory, gpu, untraced = told
        loss = math.fsum(losses)  # exact, so all ranks get the same bits
        written = [int(size) for size in written]
        reports = RankReports(
            loss, losses, norms, exchange_s, step_s, compute_s, int(max(requests)), written, pipeline_s, memory, gpu
        )
        self.checkpoints.settle(reports.written)
        self.failures.tell(untraced)
        if self.slow_steps.is_kept(max(reports.step_s)):
            self.tracer.keep_step()
        return reports

    def memory(self) -> tuple[int, int]:
        """Return this process's peak host memory, and the bytes in use of its GPU.

        CUDA is asked only at every GPU_ASKED_EACH-th meeting. CuPy keeps memory that it has allocated, so the next
        answer includes what the steps in between needed.
        """
        if self.device and self._met % GPU_ASKED_EACH == 0:
            self._gpu_bytes = self.device.used_bytes()
        self._met += 1
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, self._gpu_bytes
