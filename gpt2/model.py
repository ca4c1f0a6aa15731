"""GPT-2 (Radford et al. 2019): forward and backward, written once for every kernel set.

    x = wte[tokens] + wpe
    for each layer:
        x = x + attproj(attention(qkv(ln1(x))))
        x = x + fcproj(gelu(fc(ln2(x))))
    loss = cross_entropy(lnf(x) @ wte.T, targets)

x is the residual stream. A branch is the output of a half block (attention or feed-forward), to be added to x. One
kernel adds a branch and its bias to the stream, and computes the LayerNorm of the sum:

    residual = stream + branch + branch_bias;    out = LayerNorm(residual)

So the loop postpones each addition: _attention and _feed_forward return their branch, and the next _normalize adds it.
Backward needs every residual. Their gradient, dresidual, is one array that all layers add to.

Short names: k is the kernel set, p and g are all parameters and gradients, s is the scratch arrays that layers share;
a, w and d are one layer's activations, parameters and gradients. Kernels take their outputs first.
Shapes: B sequences of T positions, N = B T rows, C channels.
"""

import numpy as np

from gpt2.activations import new_activations, new_scratch
from gpt2.embedding import SparseEmbedding, TiedEmbedding
from gpt2.parameters import Layout, Parameters, no_hook


class GPT2:
    """A GPT-2 over given parameters, for batches of (B, T) tokens. The constructor allocates all buffers.

    gradients: same layout as the parameters, or None for a model that only runs forward.
    before_use(start, stop) is called each time before a range of the parameters is used: in forward the layout's ranges
    in order, in backward in reverse order without the embeddings' range, which stays in use for the head.
    in_flight: how many microbatches may be between forward and backward at once. Each has a slot for its activations.
    lookup: None, or the rows of a sparse embedding gradient (gpt2/embedding.py).
    branch: memory (B T, C) for the branches, or None to allocate it.
    """

    def __init__(
        self,
        kernels,
        parameters: Parameters,
        gradients: Parameters | None,
        batch_size: int,
        sequence_length: int,
        before_use=no_hook,
        in_flight: int = 1,
        lookup=None,
        branch=None,
    ):
        self.kernels = kernels
        self.parameters = parameters
        self.gradients = gradients
        self.before_use = before_use
        self.lookup = lookup
        self.config = parameters.layout.config
        self.shard = parameters.layout.shard
        self.heads = self.shard.share_size(self.config.n_head)
        self.batch_size = batch_size
        self.sequence_length = sequence_length
        sizes = self.config, self.shard, batch_size, sequence_length, parameters.flat.dtype, gradients is not None
        self.kept = [new_activations(kernels, *sizes) for _ in range(in_flight)]
        self.scratch = new_scratch(kernels, *sizes, branch)
        if lookup is None:
            self.embedding = TiedEmbedding(kernels, parameters, gradients, before_use)
        else:
            self.embedding = SparseEmbedding(kernels, parameters, gradients, before_use, lookup)

    def _sum_shards(self, rows):
        """Return the sum over tensor-parallel shards: here `rows` itself (gpt2/parallel_model.py has more shards)."""
        return rows

    # Forward

    def forward(self, tokens, targets, gradient_scale: float, slot: int = 0) -> float:
        """Return the sum of the losses of tokens (B, T) against targets (B, T). The slot keeps the arrays for backward.

        gradient_scale is 1 / (tokens of the global batch), so gradients of all ranks and microbatches simply add up.
        The slot refers to `tokens`: do not change them before backward.
        """
        kept = self.kept[slot]
        self._transform(tokens, kept)
        self.embedding.classify(kept, targets, gradient_scale, trains=True)
        return float(kept.losses.sum(dtype=np.float64))

    def token_losses(self, tokens, targets):
        """Return the losses (B, T) of tokens against targets (B, T), without gradients, valid until the next call."""
        kept = self.kept[0]
        self._transform(tokens, kept)
        self.embedding.classify(kept, targets, 0.0, trains=False)
        return kept.losses.reshape(tokens.shape)

    def _transform(self, tokens, kept):
        """Run embedding, layers and final LayerNorm: kept.lnf.out (N, C) = the inputs of the head."""
        layout = self.parameters.layout
        kept.tokens = tokens
        self.embedding.embed(kept.inputs, tokens)
        stream = kept.inputs
        branch = None
        for bounds, a, w in zip(layout.layer_ranges, kept.layers, self.parameters.layers, strict=True):
            self.before_use(*bounds)
            self._normalize(a.ln1, stream, branch, self.scratch.branch_bias, w.ln1_weight, w.ln1_bias)
            branch = self._attention(tokens.shape, a, w)
            self._normalize(a.ln2, a.ln1.residual, branch, w.attproj_bias, w.ln2_weight, w.ln2_bias)
            branch = self._feed_forward(a, w)
            self.scratch.branch_bias[:] = w.fcproj_bias  # a copy: zero-3 may free the layer's parameters before its use
            stream = a.ln2.residual
        self._finish(kept, stream, branch)

    def _finish(self, kept, stream, branch):
        """Apply the final LayerNorm."""
        p = self.parameters
        self.before_use(*p.layout.ranges[-1])
        self._normalize(kept.lnf, stream, branch, self.scratch.branch_bias, p.lnf_weight, p.lnf_bias)

    def _normalize(self, norm, stream, branch, branch_bias, weight, bias):
        """Compute norm.residual = stream + branch + branch_bias;  norm.out = LayerNorm(norm.residual).

        The first layer has no branch (None); its stream is norm.residual already.
        """
        if branch is None:
            self.kernels.layernorm_forward(norm.out, norm.mean, norm.rstd, stream, weight, bias)
        else:
            self.kernels.residual_layernorm_forward(
                norm.residual, norm.out, norm.mean, norm.rstd, stream, branch, branch_bias, weight, bias
            )

    def _attention(self, shape, a, w):
        """Return the branch (N, C) = attproj(attention(qkv(ln1))), without attproj's bias."""
        k = self.kernels
        k.linear_forward(a.qkv, a.ln1.out, w.qkv_weight, w.qkv_bias)
        k.attention_forward(a.attention.reshape(*shape, -1), a.logsumexp, a.qkv.reshape(*shape, -1), self.heads)
        branch = self.scratch.branch
        k.linear_forward(branch, a.attention, w.attproj_weight, None)
        return self._sum_shards(branch)

    def _feed_forward(self, a, w):
        """Return the branch (N, C) = fcproj(gelu(fc(ln2))), without fcproj's bias."""
        self.kernels.linear_gelu_forward(a.gelu, a.gelu_saved, a.ln2.out, w.fc_weight, w.fc_bias)
        branch = self.scratch.branch
        self.kernels.linear_forward(branch, a.gelu, w.fcproj_weight, None)
        return self._sum_shards(branch)

    # Backward

    def backward(self, accumulate: bool, gradients_final=no_hook, slot: int = 0) -> None:
        """Write the gradients of the forward pass in the slot; `accumulate` adds them (all microbatches but the first).

        gradients_final(start, stop) is called for the layout's final_ranges, in order, as soon as each is final.
        """
        kept = self.kept[slot]
        layout = self.parameters.layout
        self._head_backward(kept, accumulate, gradients_final)
        layers = zip(
            layout.layer_ranges, layout.layer_halves, kept.layers, self.parameters.layers, self.gradients.layers,
            strict=True,
        )  # fmt: skip
        for bounds, (attention, feed_forward), a, w, d in reversed(list(layers)):
            self.before_use(*bounds)
            self._feed_forward_backward(a, w, d, accumulate)
            gradients_final(*feed_forward)
            self._attention_backward(a, w, d, kept.tokens.shape, accumulate)
            gradients_final(*attention)
        self.embedding.embed_backward(self.scratch.dresidual, kept.tokens, accumulate, gradients_final)

    def _head_backward(self, kept, accumulate, gradients_final):
        """Set dresidual to the gradient of the last residual."""
        p = self.parameters
        g = self.gradients
        s = self.scratch
        final_norm = p.layout.ranges[-1]
        self.embedding.classify_backward(s.dbranch, kept, accumulate, gradients_final)
        s.dresidual[:] = 0.0
        self.before_use(*final_norm)
        self._normalize_backward(g.lnf_weight, g.lnf_bias, kept.lnf, p.lnf_weight, accumulate)
        gradients_final(*final_norm)

    def _feed_forward_backward(self, a, w, d, accumulate):
        """Add to dresidual the gradient through fcproj(gelu(fc(ln2))) and ln2.

        dresidual is also the gradient of the branch, because the branch is added to the stream.
        """
        k = self.kernels
        s = self.scratch
        self._branch_bias_backward(d.fcproj_bias, accumulate)
        k.gelu_linear_backward(s.dfc, d.fcproj_weight, s.dresidual, a.gelu, a.gelu_saved, w.fcproj_weight, accumulate)
        k.linear_backward(s.dbranch, d.fc_weight, d.fc_bias, s.dfc, a.ln2.out, w.fc_weight, accumulate)
        self._normalize_backward(d.ln2_weight, d.ln2_bias, a.ln2, w.ln2_weight, accumulate)

    def _attention_backward(self, a, w, d, shape, accumulate):
        """Add to dresidual the gradient through attproj(attention(qkv(ln1))) and ln1."""
        k = self.kernels
        s = self.scratch
        self._branch_bias_backward(d.attproj_bias, accumulate)
        k.linear_backward(s.dattention, d.attproj_weight, None, s.dresidual, a.attention, w.attproj_weight, accumulate)
        k.attention_backward(
            s.dqkv.reshape(*shape, -1), s.dattention.reshape(*shape, -1), a.qkv.reshape(*shape, -1),
            a.attention.reshape(*shape, -1), a.logsumexp, self.heads,
        )  # fmt: skip
        k.linear_backward(s.dbranch, d.qkv_weight, d.qkv_bias, s.dqkv, a.ln1.out, w.qkv_weight, accumulate)
        self._normalize_backward(d.ln1_weight, d.ln1_bias, a.ln1, w.ln1_weight, accumulate)

    def _normalize_backward(self, dweight, dbias, norm, weight, accumulate):
        """Add to dresidual the gradient through a LayerNorm whose output has gradient dbranch.

        dbranch_bias (C,) = the column sums of dresidual: the gradient of the bias that this LayerNorm's residual added.
        The half block below stores it first (_branch_bias_backward), because the gradient buffer of its layer may not
        exist yet (zero-2, zero-3).
        """
        s = self.scratch
        self.kernels.layernorm_backward(
            s.dresidual, dweight, dbias, s.dbranch_bias, self._sum_shards(s.dbranch),
            norm.residual, norm.mean, norm.rstd, weight, accumulate,
        )  # fmt: skip

    def _branch_bias_backward(self, dbias, accumulate):
        """Compute dbias = or += dbranch_bias."""
        if accumulate:
            self.kernels.add(dbias, dbias, self.scratch.dbranch_bias)
        else:
            dbias[:] = self.scratch.dbranch_bias


def new_model(config, kernels, batch_size: int, sequence_length: int, dtype=np.float32) -> GPT2:
    """Return a model with zeroed parameters and gradients of its own, for tests and tools that need no strategy."""
    layout = Layout(config)
    parameters = Parameters(layout, kernels.empty((layout.size,), dtype))
    gradients = Parameters(layout, kernels.empty((layout.size,), dtype))
    return GPT2(kernels, parameters, gradients, batch_size, sequence_length)
