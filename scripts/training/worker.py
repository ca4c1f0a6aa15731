"""What a rank computes in a step: a worker takes its windows through the model, a dedicated server computes nothing."""

import math
from collections.abc import Callable

import numpy as np

from dist.ranges import cut
from dist.stage_links import DOWN, UP
from gpt2.data.windows import Windows
from gpt2.model import GPT2, no_hook
from gpt2.pipeline import Actions
from traces.record.phases import EXCHANGE, PHASES, PIPELINE


class NoStageLinks:
    """The links of a model that has one stage: none. dist/stage_links.py has those between several."""

    def begin(self, forwards: int, backwards: int) -> None:
        """So many micro-steps follow."""

    def finish(self) -> None:
        """Return when all that was sent has left."""


class Worker:
    """Worker number `worker` of `workers`; each takes a contiguous part of every global batch, in K micro-steps of B.

    The s-th step (s = 0, 1, ...) uses windows s*G .. (s+1)*G-1, G = B K workers. So G alone decides which windows a
    step uses, and with them the loss curve. The first micro-step writes the gradients and the others add to them.
    Without keeps_gradients each micro-step writes, because the strategy takes its gradients away.

    actions: what it does in a step (gpt2/pipeline.py), the model having room for the micro-steps that are under way.
    stage_links: of a pipeline's stage, to its neighbours. The ranks that share a model are one worker: each reads its
    windows, and part 0 of the last stage counts the losses. Where the model has a lookup, it is told what this step and
    the next one look up.
    """

    def __init__(
        self,
        model: GPT2,
        train: Windows,
        val: Windows | None,
        actions: Actions,
        worker: int,
        workers: int,
        tracer,
        keeps_gradients: bool = True,
        stage_links=None,
    ):
        self.model, self.train, self.val, self.tracer = model, train, val, tracer
        self.actions, self.worker, self.workers = actions, worker, workers
        self.keeps_gradients, self.stage_links = keeps_gradients, stage_links or NoStageLinks()
        self.micro_steps = len(actions) // 2
        self.global_batch = model.batch_size * self.micro_steps * workers
        self.scale = 1.0 / (self.global_batch * model.sequence_length)
        shape = (len(model.kept), model.batch_size, model.sequence_length)
        self.inputs, self.targets = np.empty(shape, np.int32), np.empty(shape, np.int32)
        self.counts_losses = model.shard.is_last and model.shard.tp_rank == 0

    def gradients(self, step: int, gradients_final) -> float:
        """Compute the gradients of step 1, 2, ... into the model's gradient buffer; returns this rank's part of the
        mean loss.

        gradients_final(start, stop) is called as soon as a range of them is final: in the last micro-step, or in each
        one if gradients are not kept.
        """
        first, loss = self._first_window(step), 0.0
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
        slot, shard = micro_step % len(self.inputs), self.model.shard
        with self.tracer.phase("data"):
            self.train.read(first + micro_step * self.model.batch_size, self.inputs[slot], self.targets[slot])
        if not shard.is_first:
            self.stage_links.receive(DOWN, self.model.inputs(slot))
        with self.tracer.phase("forward"):
            loss = self.model.forward(self.inputs[slot], self.targets[slot], self.scale, slot) * self.scale
        if not shard.is_last:
            self.stage_links.send(DOWN, self.model.outputs)
        return loss

    def _backward(self, micro_step: int, gradients_final) -> None:
        slot, shard = micro_step % len(self.inputs), self.model.shard
        if not shard.is_last:
            self.stage_links.receive(UP, self.model.dresidual)
        is_final = micro_step == self.micro_steps - 1 or not self.keeps_gradients
        with self.tracer.phase("backward"):
            accumulates = micro_step > 0 and self.keeps_gradients
            final = gradients_final if is_final else no_hook
            # A head that is borrowed goes back once a step, however often the strategy takes gradients away.
            head = {} if shard.is_first else {"accumulate_head": micro_step > 0}
            self.model.backward(accumulates, final, slot, **head)
        if not shard.is_first:
            self.stage_links.send(UP, self.model.dresidual)

    def validation_loss(self, batches: int, after_batch: Callable[[], None] = lambda: None) -> tuple[float, int]:
        """(sum of losses, tokens) of this worker's part of the first windows of the validation set; of the ranks that
        share a model, from the one that counts the losses.

        Each worker takes `batches` of B windows, or fewer where the set ends; 0: all workers together take the whole
        set. All of them compute the same number of batches, even if the last one of some holds no window: parameters
        may have to be gathered for each batch, and that takes every rank. after_batch() is called after each.
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
        """The sum of the losses of `count` validation windows; 0 from a stage that is not the last."""
        inputs, targets, shard = self.inputs[0], self.targets[0], self.model.shard
        self.val.read(first, inputs[:count], targets[:count])
        inputs[count:], targets[count:] = 0, 0  # rows beyond the last window are computed and not counted
        if not shard.is_first:
            self.stage_links.receive(DOWN, self.model.inputs(0))
        losses = self.model.token_losses(inputs, targets)
        if not shard.is_last:
            self.stage_links.send(DOWN, self.model.outputs)
            return 0.0
        return float(losses[:count].sum(dtype=np.float64))

    def seconds(self) -> tuple[float, float, float, float]:
        """Of the step that has just been made: (seconds of exchange that nothing hid, seconds of computing gradients,
        seconds of all its phases so far, seconds of waiting for neighbouring stages).

        Waiting for data counts as computing: a rank that its data holds up is slow for the others all the same.
        """
        computing = "data", "forward", "backward"
        return tuple(self.tracer.seconds(*phases) for phases in (EXCHANGE, computing, PHASES, PIPELINE))


class Server:
    """A rank that computes no gradients (--server dedicated): it adds nothing to what is summed over the workers."""

    def gradients(self, step: int, gradients_final) -> float:
        return 0.0

    def validation_loss(self, batches: int, after_batch: Callable[[], None] = lambda: None) -> tuple[float, int]:
        return 0.0, 0

    def seconds(self) -> tuple[float, float, float, float]:
        """nan: it is neither slow nor fast."""
        return 0.0, math.nan, 0.0, 0.0
