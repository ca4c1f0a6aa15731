"""The end of a step, where all ranks meet: they tell each other their losses and times, and what a signal asked for."""

import math
import resource
from typing import NamedTuple

from dist.waiting import gather_everywhere
from dist.world import end_with_one_line
from scripts.training.signals import Clock, Signals
from traces.record.steps import SlowSteps

# In meetings: a question to CUDA's driver takes up to a millisecond, and what is in use changes slowly.
GPU_ASKED_EACH = 16


class Meeting(NamedTuple):
    """What all ranks know when they have met, the same on each of them.

    loss: of the global batch, the mean. asked: the most that a signal or the clock asked of any rank. The others are of
    each rank: losses: what it adds to the loss. norms: of the gradients that it has updated with, 0 where it knows none
    or has skipped the step. exchange_s: seconds of exchange that nothing hid. step_s: of the step so far. compute_s:
    that its gradients took, nan for a server. pipeline_s: that it waited for neighbouring stages. written: how much of
    its part of a checkpoint is on disk (Checkpointing.written). memory_bytes: the most that it has held in host memory
    so far. gpu_bytes: of its GPU's memory, in use when it was last asked; 0 without one.
    """

    loss: float
    losses: list[float]
    norms: list[float]
    exchange_s: list[float]
    step_s: list[float]
    compute_s: list[float]
    asked: int
    written: list[int]
    pipeline_s: list[float] = ()
    memory_bytes: list[float] = (0.0,)
    gpu_bytes: list[float] = (0.0,)


class MeetingPoint:
    """Where all ranks meet once a step, with one small all-gather.

    worker: this rank's Worker or Server. asking: what may ask something of the run. checkpoints: a Checkpointing, which
    completes a checkpoint once all ranks know that all of them have written their parts. failures: TraceFailures, which
    are told once all ranks know of them. tracer: a Tracer, which keeps a step that took long: all ranks know the same
    of it, so all keep it. device: its GPU, or None.
    """

    def __init__(self, comm, worker, asking: list[Signals | Clock], checkpoints, failures, tracer, device=None):
        self.comm, self.worker, self.asking = comm, worker, asking
        self.checkpoints, self.failures = checkpoints, failures
        self.tracer, self.slow_steps, self.device = tracer, SlowSteps(), device
        self._met, self._gpu_bytes = 0, 0

    def meet(self, loss_part: float, norm: float | None) -> Meeting:
        """Collective. loss_part: of the mean loss, what this rank's windows add. norm: of the gradients, None if it is
        not known here, or the step was skipped."""
        asked = max(one.asked() for one in self.asking)
        own = (loss_part, norm or 0.0, *self.worker.seconds(), asked, self.checkpoints.written())
        *told, memory, gpu, untraced = gather_everywhere(self.comm, *own, *self.memory(), self.failures.own()).T
        losses, norms, exchange_s, compute_s, step_s, pipeline_s, asked, written = told
        meeting = Meeting(
            loss=math.fsum(losses),  # exact, so all ranks get the same bits
            losses=losses.tolist(),
            norms=norms.tolist(),
            exchange_s=exchange_s.tolist(),
            step_s=step_s.tolist(),
            compute_s=compute_s.tolist(),
            asked=int(asked.max()),
            written=written.astype(int).tolist(),
            pipeline_s=pipeline_s.tolist(),
            memory_bytes=memory.tolist(),
            gpu_bytes=gpu.tolist(),
        )
        self.checkpoints.settle(meeting.written)
        self.failures.tell(untraced)
        if self.slow_steps.is_kept(max(meeting.step_s)):
            self.tracer.keep_step()
        return meeting

    def memory(self) -> tuple[int, int]:
        """(most bytes that this process has held in host memory, bytes of its GPU that are in use).

        The GPU is asked at the first meeting, and then at each GPU_ASKED_EACH-th. Memory that CuPy has taken it keeps,
        so what the steps between have needed is in the next answer.
        """
        if self.device and self._met % GPU_ASKED_EACH == 0:
            self._gpu_bytes = self.device.used_bytes()
        self._met += 1
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, self._gpu_bytes


def end_if_diverged(world, step: int, meeting: Meeting, val_loss: float = 0.0) -> None:
    """End the job if a number of this step is none any more: the loss, the gradients' norm or the validation loss.

    All ranks have heard the same numbers, so all of them come here. A skipped step's norm does not count.
    """
    found = {"loss": meeting.losses, "gradients' norm": meeting.norms, "validation loss": [val_loss]}
    for what, parts in found.items():
        if not math.isfinite(sum(parts)):
            rank, number = next((rank, part) for rank, part in enumerate(parts) if not math.isfinite(part))
            # A rank is named if it is one among others whose numbers are good; 0 is that of a rank that has none.
            is_alone = any(part and math.isfinite(part) for part in parts)
            whose = f" (rank {rank} on {world.places[rank]['host']})" if is_alone else ""
            text = f"the {what} of step {step} is {number}{whose}: lower --lr, raise --warmup, or check the data"
            end_with_one_line(world.comm, text)
