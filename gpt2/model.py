"""GPT-2 (Radford et al. 2019), forward and backward over the layers; written once for every kernel set.

A block is  x = x + attproj(attention(ln1(x)));  x = x + fcproj(gelu(fc(ln2(x)))).  The residual stream after each half
block is kept for backward. One kernel makes each LayerNorm together with the residual addition before it.

Ranks that have parts of the tensors sum what attproj and fcproj give in forward, and what qkv and fc give in backward:
Megatron's g and f (Shoeybi et al. 2019). Between two sums every part has the whole stream.

The biases of attproj and fcproj are added where the sum is read, by the kernel that makes the next LayerNorm. That of
fcproj is the layer before's, whose parameters may be gone by then, or whose gradients may have no room yet (zero-2,
zero-3): so the model keeps both in between.

Short names: k is the kernel set, p all parameters; a, w and d are one layer's activations, parameters and gradients.
"""

import numpy as np

from gpt2.activations import new_activations, widths
from gpt2.parameters import LOOKUP, Layout, Parameters, no_hook
from gpt2.pieces import ALONE


class GPT2:
    """A GPT-2 over given parameters, with room for batches of (B, T) tokens. All buffers are made here, once.

    gradients: same layout as the parameters, or None for a model that only runs forward.
    before_use(start, stop) is called each time before a range of the parameters is used. Forward goes through the
    layout's ranges in their order, backward in reverse through all but the embeddings'. These stay in use from forward
    to backward, since the token embedding is also the head.

    lookup: None, or where looked-up rows of the token embedding are, apart from it (dist/looked_up.py): values
    (rows, C), and numbers(tokens), the row of each. They have the parameters if `has_parameters`; a step's first
    backward calls begin_gradients(), and from then on their gradients go there. Those of the embedding are the head's
    alone. Hooks hear of the layout's split ranges: as head, the embedding is used block by block, and last.

    Of a piece of a model (gpt2/pieces.py), parts says how the parts of its tensors are summed, and in_flight how many
    batches may be between forward and backward: each has a slot for what backward needs. A stage that is not the first
    begins forward with inputs(slot); one that is not the last leaves `outputs`. Backward begins with the gradient of
    the outputs in `dresidual`, and leaves that of the inputs there.
    """

    def __init__(
        self,
        kernels,
        parameters: Parameters,
        gradients: Parameters | None,
        batch_size: int,
        sequence_length: int,
        before_use=no_hook,
        parts=ALONE,
        in_flight: int = 1,
        lookup=None,
    ):
        self.kernels, self.parameters, self.gradients = kernels, parameters, gradients
        self.before_use, self.parts, self.lookup = before_use, parts, lookup
        self.config, self.piece = parameters.layout.config, parameters.layout.piece
        self.batch_size, self.sequence_length = batch_size, sequence_length
        self.heads = self.piece.share_size(self.config.n_head)
        rows = self.config.padded_vocab_size
        # What the embedding's and the head's kernels need of a part of the vocabulary.
        self._tokens = {"first_token": self.piece.share(rows)[0]} if self.piece.parts > 1 else {}
        self._allocate(parameters.flat.dtype, in_flight)

    def _allocate(self, dtype, in_flight):
        N, C, (A, F) = self.batch_size * self.sequence_length, self.config.n_embd, widths(self.config, self.piece)
        shape, trains = (self.batch_size, self.sequence_length), self.gradients is not None
        self.kept = [
            new_activations(self.kernels, self.config, self.piece, *shape, dtype, trains) for _ in range(in_flight)
        ]
        room = self.parts.room((N, C))
        # Forward has used its branch before backward begins, so it is backward's, too.
        self.branch = self.dbranch = self.kernels.empty((N, C), dtype) if room is None else room
        self.branch_bias = self.kernels.empty((C,), dtype)
        self.outputs = None if self.piece.is_last else self.kernels.empty((N, C), dtype)
        if self.gradients is not None:
            self.dbranch_bias = self.kernels.empty((C,), dtype)
            self.dresidual = self.kernels.empty((N, C), dtype)
            # The gradient of fc's output is used up before that of qkv's is made.
            operands = self.kernels.empty((N * max(3 * A, F),), self.kernels.operand_dtype or dtype)
            self.dqkv, self.dfc = (operands[: N * n].reshape(N, n) for n in (3 * A, F))
            self.dattention = self.dbranch if A == C else self.kernels.empty((N, A), dtype)

    def inputs(self, slot: int):
        """(N, C): where the inputs of a stage that is not the first go before forward."""
        return self.kept[slot].inputs

    def forward(self, tokens, targets, gradient_scale: float, slot: int = 0) -> float:
        """Sum of the losses of tokens (B, T) against targets (B, T); leaves what backward needs of them in the slot.

        gradient_scale is 1 / (tokens of the global batch): then gradients of all ranks and micro-steps only ever sum.
        0 from a stage that is not the last.
        """
        kept = self.kept[slot]
        kept.tokens = tokens
        by_rows = self.lookup is not None and self.lookup.has_parameters
        self._transform(tokens, kept, by_rows)
        if not self.piece.is_last:
            return 0.0
        head = {}
        if by_rows:
            head = {"blocks": self._head_used(), "target_rows": (self.lookup.values, self.lookup.numbers(targets))}
        self._classify(kept, targets, kept.exponentials, kept.row_scale, gradient_scale, head)
        return float(kept.losses.sum(dtype=np.float64))

    def token_losses(self, tokens, targets):
        """Losses (B, T) of tokens against targets (B, T), without gradients: a view, valid until the next call.

        None from a stage that is not the last.
        """
        kept = self.kept[0]
        self._transform(tokens, kept)
        if not self.piece.is_last:
            return None
        self._classify(kept, targets, None, None, 0.0)
        return kept.losses.reshape(tokens.shape)

    def logits(self, tokens):
        """Logits (B, T, V) of tokens (B, T), newly allocated; of a whole model."""
        kept = self.kept[0]
        self._transform(tokens, kept)
        out = self.kernels.empty((len(kept.lnf), self.config.padded_vocab_size), self.parameters.flat.dtype)
        self.kernels.linear_forward(out, kept.lnf, self.parameters.wte, None)
        return out.reshape(*tokens.shape, -1)[:, :, : self.config.vocab_size]

    def _classify(self, kept, targets, exponentials, row_scale, gradient_scale, head=None):
        parts = {"parts": self.parts} | self._tokens if self._tokens else head or {}
        self.kernels.classifier_forward(
            kept.losses, exponentials, row_scale, kept.lnf, self.parameters.wte,
            targets.reshape(-1), self.config.vocab_size, gradient_scale, **parts,
        )  # fmt: skip

    def _head_used(self):
        """Yield the rows of each block of the head, once it may be used."""
        for start, stop in self.parameters.layout.head_blocks:
            self.before_use(start, stop)
            yield start // self.config.n_embd, stop // self.config.n_embd

    def _head_final(self, gradients_final):
        """Yield the rows of each block of the head from the last one on: its gradients are final when the next one is
        asked for."""
        for start, stop in reversed(self.parameters.layout.head_blocks):
            yield start // self.config.n_embd, stop // self.config.n_embd
            gradients_final(start, stop)

    def _transform(self, tokens, kept, by_rows=False):
        """All that the piece has: embedding, blocks, final LayerNorm; or the sum that the next stage begins with.

        by_rows: the embeddings of the tokens are the lookup's.
        """
        p, layout = self.parameters, self.parameters.layout
        ranges = iter(layout.split_ranges if by_rows else layout.ranges)
        if self.piece.is_first:
            if by_rows:
                self.before_use(*next(ranges))
            self.before_use(*next(ranges))
            self._embed(tokens, kept.inputs, by_rows)
        stream, branch = kept.inputs, None  # the branch is still to be added to the stream
        for a, w in zip(kept.layers, p.layers, strict=True):
            self.before_use(*next(ranges))
            first = a.residual1, a.ln1, a.ln1_mean, a.ln1_rstd
            self._normalize(*first, stream, branch, self.branch_bias, w.ln1_weight, w.ln1_bias)
            branch = self._attend(tokens.shape, a, w)
            second = a.residual2, a.ln2, a.ln2_mean, a.ln2_rstd
            self._normalize(*second, a.residual1, branch, w.attproj_bias, w.ln2_weight, w.ln2_bias)
            branch = self._feed_forward(a, w)
            self.branch_bias[:] = w.fcproj_bias
            stream = a.residual2
        if self.piece.is_last:
            self.before_use(*next(ranges))
            last = kept.residual, kept.lnf, kept.lnf_mean, kept.lnf_rstd
            self._normalize(*last, stream, branch, self.branch_bias, p.lnf_weight, p.lnf_bias)
        else:
            self.kernels.add(self.outputs, stream, branch, self.branch_bias)

    def _embed(self, tokens, stream, by_rows):
        """stream (N, C) = the embeddings; parts of the vocabulary sum theirs up."""
        if by_rows:
            table, tokens = self.lookup.values, self.lookup.numbers(tokens)
            self.kernels.embedding_forward(stream.reshape(*tokens.shape, -1), tokens, table, self.parameters.wpe)
            return
        p, out = self.parameters, self.branch if self._tokens else stream
        self.kernels.embedding_forward(out.reshape(*tokens.shape, -1), tokens, p.wte, p.wpe, **self._tokens)
        if self._tokens:
            stream[:] = self.parts.sum(out)

    def _normalize(self, residual, out, mean, rstd, stream, branch, branch_bias, weight, bias):
        """residual = stream + branch + branch_bias, if there is a branch; out = LayerNorm of that."""
        if branch is None:
            self.kernels.layernorm_forward(out, mean, rstd, stream, weight, bias)
        else:
            sums = residual, out, mean, rstd, stream, branch, branch_bias
            self.kernels.residual_layernorm_forward(*sums, weight, bias)

    def _attend(self, shape, a, w):
        """(N, C): what the first half of a block adds to the stream, but for its bias, summed over the parts' heads."""
        k = self.kernels
        k.linear_forward(a.qkv, a.ln1, w.qkv_weight, w.qkv_bias)
        k.attention_forward(a.attention.reshape(*shape, -1), a.logsumexp, a.qkv.reshape(*shape, -1), self.heads)
        k.linear_forward(self.branch, a.attention, w.attproj_weight, None)
        return self.parts.sum(self.branch)

    def _feed_forward(self, a, w):
        """(N, C): what the second half of a block adds to the stream, likewise, summed over the parts' columns."""
        self.kernels.linear_gelu_forward(a.gelu, a.gelu_saved, a.ln2, w.fc_weight, w.fc_bias)
        self.kernels.linear_forward(self.branch, a.gelu, w.fcproj_weight, None)
        return self.parts.sum(self.branch)

    def backward(self, accumulate: bool, gradients_final=no_hook, slot: int = 0, accumulate_head=None) -> None:
        """Gradients of the last forward in the slot, written, or added if `accumulate` (micro-steps after the first).

        gradients_final(start, stop) is called as soon as no more will be added to that flat range: the layout's
        final_ranges, in their order. accumulate_head: accumulate's place for a borrowed head, if it differs.
        """
        k, p, d, kept = self.kernels, self.parameters, self.gradients, self.kept[slot]
        ranges, final_ranges = list(p.layout.ranges), iter(p.layout.final_ranges())
        if self.piece.is_last:
            head = {} if self.lookup is None else {"blocks": self._head_final(gradients_final)}
            self._head_backward(
                kept, ranges.pop(), accumulate, accumulate if accumulate_head is None else accumulate_head, head
            )
            gradients_final(*next(final_ranges))
        else:
            k.column_sums(self.dbranch_bias, self.dresidual, False)
        for layer in reversed(list(zip(kept.layers, p.layers, d.layers, strict=True))):
            self.before_use(*ranges.pop())
            self._feed_forward_backward(*layer, accumulate)
            gradients_final(*next(final_ranges))
            self._attention_backward(*layer, kept.tokens.shape, accumulate)
            gradients_final(*next(final_ranges))
        if self.piece.is_first:
            if not (self.piece.is_last or accumulate):
                d.wte[:] = 0.0  # the head, whose gradient comes first elsewhere, is another stage's
            dstream = self.dresidual.reshape(*kept.tokens.shape, -1)
            if self.lookup is not None:
                if not accumulate:
                    self.lookup.begin_gradients()
                numbers = self.lookup.numbers(kept.tokens)
                k.embedding_backward(self.lookup.values, d.wpe, dstream, numbers, accumulate)
                gradients_final(*p.layout.split_ranges[1])
                gradients_final(*LOOKUP)
                return
            k.embedding_backward(d.wte, d.wpe, dstream, kept.tokens, accumulate, **self._tokens)
            gradients_final(*next(final_ranges))

    def _head_backward(self, kept, last_range, accumulate, accumulate_head, head):
        """The gradient of the final LayerNorm's inputs, in dresidual, and its column sums."""
        k, p, d = self.kernels, self.parameters, self.gradients
        saved = kept.exponentials, kept.row_scale, kept.lnf
        k.classifier_backward(self.dbranch, d.wte, *saved, p.wte, accumulate_head, **head)
        self.dresidual[:] = 0.0
        self.before_use(*last_range)
        k.layernorm_backward(
            self.dresidual, d.lnf_weight, d.lnf_bias, self.dbranch_bias, self.parts.sum(self.dbranch),
            kept.residual, kept.lnf_mean, kept.lnf_rstd, p.lnf_weight, accumulate,
        )  # fmt: skip

    def _feed_forward_backward(self, a, w, d, accumulate):
        """The second half of a block: dresidual holds the gradient of its output before, of its input after, and
        dbranch_bias the column sums of that."""
        k = self.kernels
        self._branch_bias_backward(d.fcproj_bias, accumulate)
        k.gelu_linear_backward(
            self.dfc, d.fcproj_weight, self.dresidual, a.gelu, a.gelu_saved, w.fcproj_weight, accumulate
        )
        k.linear_backward(self.dbranch, d.fc_weight, d.fc_bias, self.dfc, a.ln2, w.fc_weight, accumulate)
        k.layernorm_backward(
            self.dresidual, d.ln2_weight, d.ln2_bias, self.dbranch_bias, self.parts.sum(self.dbranch),
            a.residual2, a.ln2_mean, a.ln2_rstd, w.ln2_weight, accumulate,
        )  # fmt: skip

    def _attention_backward(self, a, w, d, shape, accumulate):
        """The first half of a block, likewise."""
        k = self.kernels
        self._branch_bias_backward(d.attproj_bias, accumulate)
        dattention, weights = self.dattention, (d.attproj_weight, None)
        k.linear_backward(dattention, *weights, self.dresidual, a.attention, w.attproj_weight, accumulate)
        dqkv, dattention, qkv, attention = (
            rows.reshape(*shape, -1) for rows in (self.dqkv, dattention, a.qkv, a.attention)
        )
        k.attention_backward(dqkv, dattention, qkv, attention, a.logsumexp, self.heads)
        k.linear_backward(self.dbranch, d.qkv_weight, d.qkv_bias, self.dqkv, a.ln1, w.qkv_weight, accumulate)
        k.layernorm_backward(
            self.dresidual, d.ln1_weight, d.ln1_bias, self.dbranch_bias, self.parts.sum(self.dbranch),
            a.residual1, a.ln1_mean, a.ln1_rstd, w.ln1_weight, accumulate,
        )  # fmt: skip

    def _branch_bias_backward(self, dbias, accumulate):
        """dbias = or += the column sums of dresidual, the gradient of the branch."""
        if accumulate:
            self.kernels.add(dbias, dbias, self.dbranch_bias)
        else:
            dbias[:] = self.dbranch_bias


def new_model(config, kernels, batch_size: int, sequence_length: int, dtype=np.float32) -> GPT2:
    """A model with its own zeroed parameters and gradients: for tests and tools that need no strategy."""
    layout = Layout(config)
    parameters, gradients = (Parameters(layout, kernels.empty((layout.size,), dtype)) for _ in range(2))
    return GPT2(kernels, parameters, gradients, batch_size, sequence_length)
