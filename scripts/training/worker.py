"""What a rank computes in a step: a worker takes its windows through the model, a dedicated server computes nothing."""

import math
from collections.abc import Callable

import numpy as np

from dist.ranges import cut
from gpt2.data.windows import Windows
from gpt2.model import GPT2, no_hook
from traces.record.phases import PHASES


class Worker:
    """Worker number `worker` of `workers`; each takes a contiguous part of every global batch, in K micro-steps of B.

    The s-th step (s = 0, 1, ...) uses windows s*G .. (s+1)*G-1, G = B K workers. So G alone decides which windows a
    step uses, and with them the loss curve. The first micro-step writes the gradients and the others add to them.
    Without keeps_gradients each micro-step writes, because the strategy takes its gradients away.
    """

    def __init__(
        self,
        model: GPT2,
        train: Windows,
        val: Windows | None,
        micro_steps: int,
        worker: int,
        workers: int,
        tracer,
        keeps_gradients: bool = True,
    ):
        self.model, self.train, self.val, self.tracer = model, train, val, tracer
        self.micro_steps, self.worker, self.workers = micro_steps, worker, workers
        self.keeps_gradients = keeps_gradients
        self.global_batch = model.batch_size * micro_steps * workers
        shape = (model.batch_size, model.sequence_length)
        self.inputs, self.targets = np.empty(shape, np.int32), np.empty(shape, np.int32)

    def gradients(self, step: int, gradients_final) -> float:
        """Compute the gradients of step 1, 2, ... into the model's gradient buffer; returns this worker's part of the
        mean loss.

        gradients_final(start, stop) is called as soon as a range of them is final: in the last micro-step, or in each
        one if gradients are not kept.
        """
        scale = 1.0 / (self.global_batch * self.model.sequence_length)
        first = (step - 1) * self.global_batch + self.worker * self.micro_steps * self.model.batch_size
        loss = 0.0
        for micro_step in range(self.micro_steps):
            with self.tracer.phase("data"):
                self.train.read(first + micro_step * self.model.batch_size, self.inputs, self.targets)
            with self.tracer.phase("forward"):
                loss += self.model.forward(self.inputs, self.targets, scale) * scale
            is_final = micro_step == self.micro_steps - 1 or not self.keeps_gradients
            with self.tracer.phase("backward"):
                accumulate = micro_step > 0 and self.keeps_gradients
                self.model.backward(accumulate, gradients_final if is_final else no_hook)
        return loss

    def validation_loss(self, batches: int, after_batch: Callable[[], None] = lambda: None) -> tuple[float, int]:
        """(sum of losses, tokens) of this worker's part of the first windows of the validation set.

        Each worker takes `batches` of B windows, or fewer where the set ends; 0: all workers together take the whole
        set. All of them compute the same number of batches, even if the last one of some holds no window: parameters
        may have to be gathered for each batch, and that takes every rank. after_batch() is called after each.
        """
        B, T = self.inputs.shape
        wanted = batches * B * self.workers or self.val.count
        parts = cut(min(wanted, self.val.count), self.workers)
        start, stop = parts[self.worker]
        longest = max(high - low for low, high in parts)
        total = 0.0
        for first in range(start, start + longest, B):
            count = max(0, min(B, stop - first))
            self.val.read(first, self.inputs[:count], self.targets[:count])
            self.inputs[count:], self.targets[count:] = 0, 0  # rows beyond the last window are computed and not counted
            total += float(self.model.token_losses(self.inputs, self.targets)[:count].sum(dtype=np.float64))
            after_batch()
        return total, (stop - start) * T

    def seconds(self) -> tuple[float, float, float]:
        """Of the step that has just been made: (seconds of exchange that nothing hid, seconds of computing gradients,
        seconds of all its phases so far).

        Waiting for data counts as computing: a rank that its data holds up is slow for the others all the same.
        """
        computing = self.tracer.seconds("data", "forward", "backward")
        return self.tracer.exchange_seconds(), computing, self.tracer.seconds(*PHASES)


class Server:
    """A rank that computes no gradients (--server dedicated): it adds nothing to what is summed over the workers."""

    def gradients(self, step: int, gradients_final) -> float:
        return 0.0

    def validation_loss(self, batches: int, after_batch: Callable[[], None] = lambda: None) -> tuple[float, int]:
        return 0.0, 0

    def seconds(self) -> tuple[float, float, float]:
        """nan: it is neither slow nor fast."""
        return 0.0, math.nan, 0.0
