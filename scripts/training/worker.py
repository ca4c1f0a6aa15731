"""The compute of a rank in a step. A Worker computes gradients and losses; a Server computes nothing."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from dist.ranges import cut
from dist.stage_links import DOWN, UP
from gpt2.data.windows import Windows
from gpt2.model import GPT2, no_hook
from gpt2.pipeline import Actions
from traces.record.phases import EXCHANGE, PHASES, PIPELINE


class NoStageLinks:
    """Stage links that do nothing, for a model with one stage. dist/stage_links.py has the real ones."""

    def begin(self, forwards: int, backwards: int) -> None:
        """Begin a step with this many forwards and backwards."""

    def finish(self) -> None:
        """Wait until everything has been sent."""


@dataclass
class Worker:
    """Worker number `worker` of `workers`. It computes a contiguous part of every global batch, in microbatches of B.

    Step s = 1, 2, ... uses windows (s-1) G to s G - 1, where G is global_batch. So G alone decides which windows a step
    uses, and thus the loss curve. The first microbatch writes the gradients and the others add to them. Without
    keeps_gradients each microbatch writes, because the strategy takes the gradients away.

    The ranks that share a model are one worker: each reads the worker's windows, and the first tensor-parallel rank of
    the last stage counts the losses. A lookup, if the model has one, is told the tokens of this step and the next.
    """

    model: GPT2
    train: Windows
    val: Windows | None
    actions: Actions  # of the worker in a step (gpt2/pipeline.py)
    worker: int
    workers: int
    tracer: object
    keeps_gradients: bool = True
    stage_links: object = field(default_factory=NoStageLinks)  # to neighbouring pipeline stages

    def __post_init__(self):
        self.micro_steps = len(self.actions) // 2  # a forward and a backward each
        self.global_batch = self.model.batch_size * self.micro_steps * self.workers
        self.scale = 1.0 / (self.global_batch * self.model.sequence_length)
        shape = (len(self.model.kept), self.model.batch_size, self.model.sequence_length)
        self.inputs = np.empty(shape, np.int32)
        self.targets = np.empty(shape, np.int32)
        self.counts_losses = self.model.shard.is_last and self.model.shard.tp_rank == 0

    def forward_backward(self, step: int, gradients_final) -> float:
        """Compute a step's gradients into the model's gradient buffer. Return this rank's part of the mean loss.

        gradients_final(start, stop) is called as soon as a range is final: in the last microbatch, or in each one if
        gradients are not kept.
        """
        first = self._first_window(step)
        loss = 0.0
        if self.model.lookup is not None:
            self._tell_lookup(step)
        self.stage_links.begin(self.micro_steps, self.micro_steps)
        for action, micro_step in self.actions:
            if action == "forward":
                loss += self._forward(first, micro_step)
            else:
                self._backward(micro_step, gradients_final)
        self.stage_links.finish()
        return loss if self.counts_losses else 0.0

    def _first_window(self, step: int) -> int:
        return (step - 1) * self.global_batch + self.worker * self.micro_steps * self.model.batch_size

    def _tell_lookup(self, step: int) -> None:
        count = self.micro_steps * self.model.batch_size
        with self.tracer.phase("data"):
            ids = (self.train.tokens(self._first_window(number), count) for number in (step, step + 1))
            self.model.lookup.begin(*ids)

    def _forward(self, first: int, micro_step: int) -> float:
        slot = micro_step % len(self.inputs)
        shard = self.model.shard
        with self.tracer.phase("data"):
            self.train.read(first + micro_step * self.model.batch_size, self.inputs[slot], self.targets[slot])
        if not shard.is_first:
            self.stage_links.receive(DOWN, self.model.inputs(slot))
        with self.tracer.phase("forward"):  # forward scales the gradients, and returns the plain sum
            loss = self.model.forward(self.inputs[slot], self.targets[slot], self.scale, slot) * self.scale
        if not shard.is_last:
            self.stage_links.send(DOWN, self.model.outputs)
        return loss

    def _backward(self, micro_step: int, gradients_final) -> None:
        slot = micro_step % len(self.inputs)
        shard = self.model.shard
        if not shard.is_last:
            self.stage_links.receive(UP, self.model.dresidual)
        is_final = micro_step == self.micro_steps - 1 or not self.keeps_gradients
        with self.tracer.phase("backward"):
            accumulates = micro_step > 0 and self.keeps_gradients
            final = gradients_final if is_final else no_hook
            # The gradient of a tied head is sent once a step, even if the strategy takes gradients in each microbatch.
            head = {} if shard.is_first else {"accumulate_head": micro_step > 0}
            self.model.backward(accumulates, final, slot, **head)
        if not shard.is_first:
            self.stage_links.send(UP, self.model.dresidual)

    def validation_loss(self, batches: int, after_batch: Callable[[], None] = lambda: None) -> tuple[float, int]:
        """Return (sum of losses, tokens) of this worker's part of the first validation windows.
        Ranks that do not count losses return (0, 0).

        Each worker takes `batches` batches of B windows, or fewer at the end of the set. 0: the workers divide the
        whole set. All workers compute the same number of batches, even if the last is empty: gathering parameters for
        a batch may need every rank. after_batch() is called after each batch.
        """
        B, T = self.inputs.shape[1:]
        wanted = batches * B * self.workers or self.val.count
        parts = cut(min(wanted, self.val.count), self.workers)
        start, stop = parts[self.worker]
        longest = max(high - low for low, high in parts)
        total = 0.0
        self.stage_links.begin(-(-longest // B), 0)
        for first in range(start, start + longest, B):
            total += self._validation_losses(first, max(0, min(B, stop - first)))
            after_batch()
        self.stage_links.finish()
        return (total, (stop - start) * T) if self.counts_losses else (0.0, 0)

    def _validation_losses(self, first: int, count: int) -> float:
        """Return the sum of the losses of `count` validation windows; 0 on stages before the last."""
        inputs = self.inputs[0]
        targets = self.targets[0]
        self.val.read(first, inputs[:count], targets[:count])
        # rows beyond the last window are computed and not counted
        inputs[count:] = 0
        targets[count:] = 0
        if not self.model.shard.is_first:
            self.stage_links.receive(DOWN, self.model.inputs(0))
        losses = self.model.token_losses(inputs, targets)
        if not self.model.shard.is_last:
            self.stage_links.send(DOWN, self.model.outputs)
            return 0.0
        return float(losses[:count].sum(dtype=np.float64))

    def seconds(self) -> tuple[float, float, float, float]:
        """Return this step's seconds of exposed exchange, of computing gradients, of all phases so far,
        and of waiting for neighbouring stages.

        Waiting for data counts as computing, as it delays other ranks in the same way.
        """
        computing = "data", "forward", "backward"
        return tuple(self.tracer.seconds(*phases) for phases in (EXCHANGE, computing, PHASES, PIPELINE))


class Server:
    """A rank that computes no gradients (--server dedicated). It adds nothing to the sums over the workers."""

    def forward_backward(self, step: int, gradients_final) -> float:
        return 0.0

    def validation_loss(self, batches: int, after_batch: Callable[[], None] = lambda: None) -> tuple[float, int]:
        return 0.0, 0

    def seconds(self) -> tuple[float, float, float, float]:
        """Return zeros, and nan for compute: a server is neither slow nor fast, and averages leave it out."""
        return 0.0, math.nan, 0.0, 0.0
