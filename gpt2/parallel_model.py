"""A GPT-2 that several ranks share: each computes one pipeline stage, or one tensor-parallel shard of a stage.

Tensor parallelism is Megatron's (Shoeybi et al. 2019): shards of attproj and fcproj compute terms of a sum in forward,
shards of qkv and fc in backward. Between two sums every shard has the whole residual stream. The vocabulary is cut by
rows, so embedding and head also sum over shards.
"""

from gpt2.embedding import TiedEmbedding
from gpt2.model import GPT2
from gpt2.parameters import Parameters, no_hook


class ParallelGPT2(GPT2):
    """One model shard (gpt2/model_shards.py) of a GPT-2.

    tp_group: sums over the tensor-parallel shards of this stage; ONE_SHARD if there is only one. options: for GPT2.

    Before forward, the caller fills inputs(slot), unless this is the first stage. Forward leaves `outputs` for the next
    stage. Before backward, the caller fills `dresidual` with their gradient. Backward replaces it by the inputs'
    gradient.
    """

    def __init__(self, kernels, parameters: Parameters, gradients, batch_size, sequence_length, tp_group, **options):
        shape = batch_size * sequence_length, parameters.layout.config.n_embd
        branch = tp_group.room(shape)
        super().__init__(kernels, parameters, gradients, batch_size, sequence_length, branch=branch, **options)
        self.tp_group = tp_group
        self.embedding = ShardedEmbedding(self, tp_group)
        self.outputs = None if self.shard.is_last else kernels.empty(shape, parameters.flat.dtype)

    @property
    def dresidual(self):
        """(N, C): gradient of the outputs before backward, of the inputs after it."""
        return self.scratch.dresidual

    def inputs(self, slot: int):
        """Return the array (N, C) for the inputs of a stage that is not the first, to be filled before forward."""
        return self.kept[slot].inputs

    def forward(self, tokens, targets, gradient_scale: float, slot: int = 0) -> float:
        """Run forward as in GPT2.forward. A stage that is not the last returns 0."""
        if self.shard.is_last:
            return super().forward(tokens, targets, gradient_scale, slot)
        self._transform(tokens, self.kept[slot])
        return 0.0

    def token_losses(self, tokens, targets):
        """Compute losses as in GPT2.token_losses. A stage that is not the last returns None."""
        if self.shard.is_last:
            return super().token_losses(tokens, targets)
        self._transform(tokens, self.kept[0])
        return None

    def backward(
        self, accumulate: bool, gradients_final=no_hook, slot: int = 0, accumulate_head: bool | None = None
    ) -> None:
        """Run backward as in GPT2.backward. accumulate_head replaces `accumulate` for the head, if it differs."""
        self.embedding.accumulate_head = accumulate if accumulate_head is None else accumulate_head
        super().backward(accumulate, gradients_final, slot)

    def _sum_shards(self, rows):
        return self.tp_group.sum(rows)

    def _finish(self, kept, stream, branch):
        if self.shard.is_last:
            super()._finish(kept, stream, branch)
        else:
            self.kernels.add(self.outputs, stream, branch, self.scratch.branch_bias)

    def _head_backward(self, kept, accumulate, gradients_final):
        if self.shard.is_last:
            super()._head_backward(kept, accumulate, gradients_final)
        else:
            self.kernels.column_sums(self.scratch.dbranch_bias, self.dresidual, False)


class ShardedEmbedding(TiedEmbedding):
    """A tied embedding with its rows divided among tp ranks. The first stage embeds, the last stage has the head."""

    accumulate_head = False

    def __init__(self, model, tp_group):
        super().__init__(model.kernels, model.parameters, model.gradients, model.before_use)
        self.shard = model.shard
        self.tp_group = tp_group
        self.partial_sums = model.scratch.branch
        self.rows = {}  # which rows of the vocabulary: an argument of the kernels
        if self.shard.tp_size > 1:
            self.rows = {"first_token": self.shard.share(self.layout.config.padded_vocab_size)[0]}

    def embed(self, out, tokens) -> None:
        if not self.shard.is_first:
            return
        if not self.rows:
            super().embed(out, tokens)
            return
        super().embed(self.partial_sums, tokens, **self.rows)
        out[:] = self.tp_group.sum(self.partial_sums)

    def embed_backward(self, dout, tokens, accumulate: bool, gradients_final) -> None:
        if not self.shard.is_first:
            return
        if not (self.shard.is_last or accumulate):
            self.gradients.wte[:] = 0.0  # the head, which writes it in a whole model, is in another stage
        super().embed_backward(dout, tokens, accumulate, gradients_final, **self.rows)

    def classify(self, kept, targets, gradient_scale: float, trains: bool) -> None:
        options = {"tp_group": self.tp_group, **self.rows} if self.rows else {}
        super().classify(kept, targets, gradient_scale, trains, **options)

    def classify_backward(self, dinputs, kept, accumulate: bool, gradients_final) -> None:
        super().classify_backward(dinputs, kept, self.accumulate_head, gradients_final)
