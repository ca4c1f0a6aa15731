"""One computing rank's share of a step: its windows of the global batch, through the model, to gradients or losses."""

import numpy as np

from dist.ranges import cut
from gpt2.model import GPT2
from gpt2.windows import Windows


class Worker:
    """Worker number `worker` of `workers`; each takes a contiguous part of every global batch, in K micro-steps of B.

    The s-th step (s = 0, 1, ...) uses windows s*G .. (s+1)*G-1, G = B K workers: which windows, and so the loss curve,
    depends on G alone.
    """

    def __init__(
        self, model: GPT2, train: Windows, val: Windows | None, micro_steps: int, worker: int, workers: int, tracer
    ):
        self.model, self.train, self.val, self.tracer = model, train, val, tracer
        self.micro_steps, self.worker, self.workers = micro_steps, worker, workers
        self.global_batch = model.batch_size * micro_steps * workers
        shape = (model.batch_size, model.sequence_length)
        self.inputs, self.targets = np.empty(shape, np.int32), np.empty(shape, np.int32)

    def gradients(self, step: int, gradients_final) -> float:
        """This worker's part of the mean loss of step 1, 2, ...; its gradients are in the model's gradient buffer."""
        scale = 1.0 / (self.global_batch * self.model.sequence_length)
        first = (step - 1) * self.global_batch + self.worker * self.micro_steps * self.model.batch_size
        loss = 0.0
        for micro_step in range(self.micro_steps):
            with self.tracer.phase("data"):
                self.train.read(first + micro_step * self.model.batch_size, self.inputs, self.targets)
            with self.tracer.phase("forward"):
                loss += self.model.forward(self.inputs, self.targets, scale) * scale
            last = micro_step == self.micro_steps - 1
            with self.tracer.phase("backward"):
                self.model.backward(micro_step > 0, *([gradients_final] if last else []))
        return loss

    def validation_loss(self, batches: int) -> tuple[float, int]:
        """(sum of losses, tokens) of this worker's part of the first windows of the validation set.

        `batches` of B windows a worker, as far as there are so many; 0 for the whole set.
        """
        B, T = self.inputs.shape
        wanted = batches * B * self.workers or self.val.count
        start, stop = cut(min(wanted, self.val.count), self.workers)[self.worker]
        total = 0.0
        for first in range(start, stop, B):
            count = min(B, stop - first)
            self.val.read(first, self.inputs[:count], self.targets[:count])
            self.inputs[count:], self.targets[count:] = 0, 0  # rows beyond the last window are computed and not counted
            total += float(self.model.token_losses(self.inputs, self.targets)[:count].sum(dtype=np.float64))
        return total, (stop - start) * T
