"""The meeting at the end of a step: all ranks exchange their losses, times and requests by signals."""

import math
import resource
from typing import NamedTuple

from dist.waiting import gather_everywhere
from scripts.training.signals import Clock, Signals
from traces.record.steps import SlowSteps

# In meetings. A call of CUDA's driver takes up to a millisecond, and memory in use changes slowly.
GPU_ASKED_EACH = 16


class RankReports(NamedTuple):
    """The reports of all ranks at the end of a step, the same on every rank.

    loss: the mean over the global batch. request: the largest request of a signal or the clock on any rank. The other
    fields are lists with an entry for each rank. losses: the rank's part of the loss. norms: of the gradients that the
    rank updated with, 0 if unknown or if it skipped the step. exchange_s: seconds of exposed exchange. step_s: seconds
    of the step so far. compute_s: seconds that its gradients took, nan for a server. pipeline_s: seconds of waiting for
    neighbouring stages. written: see Checkpointing.written. memory_bytes: its peak host memory so far. gpu_bytes: its
    GPU's memory in use when the rank last looked; 0 without a GPU.
    """

    loss: float
    losses: list[float]
    norms: list[float]
    exchange_s: list[float]
    step_s: list[float]
    compute_s: list[float]
    request: int
    written: list[int]
    pipeline_s: list[float] = ()
    memory_bytes: list[float] = (0.0,)
    gpu_bytes: list[float] = (0.0,)


class MeetingPoint:
    """Lets all ranks meet once a step, in one small all-gather.

    worker: this rank's Worker or Server. requesters: Signals and Clock, which may request a checkpoint or the end.
    checkpoints: a Checkpointing, which completes a checkpoint once all ranks know that all have written their parts.
    failures: TraceFailures, to warn of failures on any rank. tracer: a Tracer, which keeps a step that took long: all
    ranks have the same reports, so all keep the same step. device: the rank's GPU, or None.
    """

    def __init__(self, comm, worker, requesters: list[Signals | Clock], checkpoints, failures, tracer, device=None):
        self.comm = comm
        self.worker = worker
        self.requesters = requesters
        self.checkpoints = checkpoints
        self.failures = failures
        self.tracer = tracer
        self.slow_steps = SlowSteps()
        self.device = device
        self._met = 0
        self._gpu_bytes = 0

    def meet(self, loss_part: float, norm: float | None) -> RankReports:
        """Exchange reports. Collective.

        loss_part: the part of this rank's windows in the mean loss. norm: of the gradients, None if this rank does not
        know it or the step was skipped.
        """
        request = max(one.requested() for one in self.requesters)
        own = (loss_part, norm or 0.0, *self.worker.seconds(), request, self.checkpoints.written())
        *told, memory, gpu, untraced = gather_everywhere(self.comm, *own, *self.memory(), self.failures.own()).T
        losses, norms, exchange_s, compute_s, step_s, pipeline_s, requests, written = told
        reports = RankReports(
            loss=math.fsum(losses),  # exact, so all ranks get the same bits
            losses=losses.tolist(),
            norms=norms.tolist(),
            exchange_s=exchange_s.tolist(),
            step_s=step_s.tolist(),
            compute_s=compute_s.tolist(),
            request=int(requests.max()),
            written=written.astype(int).tolist(),
            pipeline_s=pipeline_s.tolist(),
            memory_bytes=memory.tolist(),
            gpu_bytes=gpu.tolist(),
        )
        self.checkpoints.settle(reports.written)
        self.failures.tell(untraced)
        if self.slow_steps.is_kept(max(reports.step_s)):
            self.tracer.keep_step()
        return reports

    def memory(self) -> tuple[int, int]:
        """Return this process's peak host memory, and the bytes in use of its GPU.

        CUDA is asked at every GPU_ASKED_EACH-th meeting only. CuPy keeps memory that it has taken, so the next answer
        includes the memory that the steps in between needed.
        """
        if self.device and self._met % GPU_ASKED_EACH == 0:
            self._gpu_bytes = self.device.used_bytes()
        self._met += 1
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, self._gpu_bytes
