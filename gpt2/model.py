"""GPT-2 (Radford et al. 2019), forward and backward over the layers; written once for every kernel set.

A block is  x = x + attproj(attention(ln1(x)));  x = x + fcproj(gelu(fc(ln2(x)))).  The residual stream after each half
block is kept for backward. One kernel makes each LayerNorm together with the residual addition before it.

Short names: k is the kernel set and p all parameters. a, w and d are one layer's activations, weights (its parameters)
and their gradients.
"""

from types import SimpleNamespace

import numpy as np

from gpt2.parameters import Layout, Parameters, no_hook


class GPT2:
    """A GPT-2 over given parameters, with room for batches of (B, T) tokens. All buffers are made here, once.

    gradients: same layout as the parameters, or None for a model that only runs forward.
    before_use(start, stop) is called each time before a range of the parameters is used. Forward goes through the
    layout's ranges in their order, backward through all but the first in reverse. The first holds the embeddings. It
    stays in use from forward to backward, since the token embedding is also the head.
    """

    def __init__(
        self,
        kernels,
        parameters: Parameters,
        gradients: Parameters | None,
        batch_size: int,
        sequence_length: int,
        before_use=no_hook,
    ):
        self.kernels, self.parameters, self.gradients = kernels, parameters, gradients
        self.before_use = before_use
        self.config = parameters.layout.config
        self.batch_size, self.sequence_length = batch_size, sequence_length
        self._allocate(parameters.flat.dtype)

    def _allocate(self, dtype):
        config, B, T = self.config, self.batch_size, self.sequence_length
        N, C = B * T, config.n_embd

        def new(*shape):
            return self.kernels.empty(shape, dtype)

        def of_rows(*shape):
            return self.kernels.empty(shape, np.promote_types(dtype, np.float32))

        def layer():
            return SimpleNamespace(
                residual1=new(N, C), ln1=new(N, C), ln1_mean=of_rows(N), ln1_rstd=of_rows(N),
                qkv=new(N, 3 * C), attention=new(N, C), logsumexp=of_rows(B, config.n_head, T),
                residual2=new(N, C), ln2=new(N, C), ln2_mean=of_rows(N), ln2_rstd=of_rows(N),
                gelu=new(N, 4 * C), gelu_saved=new(N, 4 * C),
            )  # fmt: skip

        self.layers = [layer() for _ in range(config.n_layer)]
        self.residual, self.lnf, self.lnf_mean, self.lnf_rstd = new(N, C), new(N, C), of_rows(N), of_rows(N)
        self.branch, self.losses = new(N, C), of_rows(N)
        if self.gradients is not None:
            self.exponentials, self.row_scale = new(N, config.padded_vocab_size), of_rows(N)
            self.dresidual, self.dbranch, self.dqkv, self.dfc = new(N, C), new(N, C), new(N, 3 * C), new(N, 4 * C)

    def forward(self, tokens, targets, gradient_scale: float) -> float:
        """Sum of the losses of tokens (B, T) against targets (B, T); leaves what backward needs of them.

        gradient_scale is 1 / (tokens of the global batch): then gradients of all ranks and micro-steps only ever sum.
        """
        self.tokens = tokens
        self._transform(tokens)
        self._classify(targets, self.exponentials, self.row_scale, gradient_scale)
        return float(self.losses.sum(dtype=np.float64))

    def token_losses(self, tokens, targets):
        """Losses (B, T) of tokens against targets (B, T), without gradients: a view, valid until the next call."""
        self._transform(tokens)
        self._classify(targets, None, None, 0.0)
        return self.losses.reshape(tokens.shape)

    def logits(self, tokens):
        """Logits (B, T, V) of tokens (B, T), newly allocated."""
        self._transform(tokens)
        out = self.kernels.empty((len(self.lnf), self.config.padded_vocab_size), self.lnf.dtype)
        self.kernels.linear_forward(out, self.lnf, self.parameters.wte, None)
        return out.reshape(*tokens.shape, -1)[:, :, : self.config.vocab_size]

    def _classify(self, targets, exponentials, row_scale, gradient_scale):
        self.kernels.classifier_forward(
            self.losses, exponentials, row_scale, self.lnf, self.parameters.wte,
            targets.reshape(-1), self.config.vocab_size, gradient_scale,
        )  # fmt: skip

    def _transform(self, tokens):
        """Embedding and all blocks, up to the final LayerNorm."""
        k, p = self.kernels, self.parameters
        B, T, C = *tokens.shape, self.config.n_embd
        embeddings, *layers, last = p.layout.ranges
        stream = self.layers[0].residual1
        self.before_use(*embeddings)
        k.embedding_forward(stream.reshape(B, T, C), tokens, p.wte, p.wpe)
        for index, (a, w) in enumerate(zip(self.layers, p.layers, strict=True)):
            self.before_use(*layers[index])
            if index == 0:
                k.layernorm_forward(a.ln1, a.ln1_mean, a.ln1_rstd, stream, w.ln1_weight, w.ln1_bias)
            else:
                k.residual_layernorm_forward(
                    a.residual1, a.ln1, a.ln1_mean, a.ln1_rstd, stream, self.branch, w.ln1_weight, w.ln1_bias
                )
            k.linear_forward(a.qkv, a.ln1, w.qkv_weight, w.qkv_bias)
            k.attention_forward(
                a.attention.reshape(B, T, C), a.logsumexp, a.qkv.reshape(B, T, 3 * C), self.config.n_head
            )
            k.linear_forward(self.branch, a.attention, w.attproj_weight, w.attproj_bias)
            k.residual_layernorm_forward(
                a.residual2, a.ln2, a.ln2_mean, a.ln2_rstd, a.residual1, self.branch, w.ln2_weight, w.ln2_bias
            )
            k.linear_gelu_forward(a.gelu, a.gelu_saved, a.ln2, w.fc_weight, w.fc_bias)
            k.linear_forward(self.branch, a.gelu, w.fcproj_weight, w.fcproj_bias)
            stream = a.residual2
        self.before_use(*last)
        k.residual_layernorm_forward(
            self.residual, self.lnf, self.lnf_mean, self.lnf_rstd, stream, self.branch, p.lnf_weight, p.lnf_bias
        )

    def backward(self, accumulate: bool, gradients_final=no_hook) -> None:
        """Gradients of the last forward, written, or added if `accumulate` (micro-steps after the first).

        gradients_final(start, stop) is called as soon as no more will be added to that flat range: the layout's
        final_ranges, in their order.
        """
        k, p, d = self.kernels, self.parameters, self.gradients
        final_ranges = iter(p.layout.final_ranges())
        _, *layers, last = p.layout.ranges
        k.classifier_backward(self.dbranch, d.wte, self.exponentials, self.row_scale, self.lnf, p.wte, accumulate)
        self.dresidual[:] = 0.0
        self.before_use(*last)
        k.layernorm_backward(
            self.dresidual, d.lnf_weight, d.lnf_bias, self.dbranch,
            self.residual, self.lnf_mean, self.lnf_rstd, p.lnf_weight, accumulate,
        )  # fmt: skip
        gradients_final(*next(final_ranges))
        for index in reversed(range(self.config.n_layer)):
            self.before_use(*layers[index])
            layer = self.layers[index], p.layers[index], d.layers[index]
            self._feed_forward_backward(*layer, accumulate)
            gradients_final(*next(final_ranges))
            self._attention_backward(*layer, accumulate)
            gradients_final(*next(final_ranges))
        k.embedding_backward(d.wte, d.wpe, self.dresidual.reshape(*self.tokens.shape, -1), self.tokens, accumulate)
        gradients_final(*next(final_ranges))

    def _feed_forward_backward(self, a, w, d, accumulate):
        """The second half of a block: dresidual holds the gradient of its output before, of its input after."""
        k = self.kernels
        k.gelu_linear_backward(
            self.dfc, d.fcproj_weight, d.fcproj_bias, self.dresidual,
            a.gelu, a.gelu_saved, w.fcproj_weight, accumulate,
        )  # fmt: skip
        k.linear_backward(self.dbranch, d.fc_weight, d.fc_bias, self.dfc, a.ln2, w.fc_weight, accumulate)
        k.layernorm_backward(
            self.dresidual, d.ln2_weight, d.ln2_bias, self.dbranch,
            a.residual2, a.ln2_mean, a.ln2_rstd, w.ln2_weight, accumulate,
        )  # fmt: skip

    def _attention_backward(self, a, w, d, accumulate):
        """The first half of a block, likewise."""
        k, (B, T), C = self.kernels, self.tokens.shape, self.config.n_embd
        k.linear_backward(
            self.dbranch, d.attproj_weight, d.attproj_bias, self.dresidual, a.attention, w.attproj_weight, accumulate
        )
        k.attention_backward(
            self.dqkv.reshape(B, T, 3 * C), self.dbranch.reshape(B, T, C), a.qkv.reshape(B, T, 3 * C),
            a.attention.reshape(B, T, C), a.logsumexp, self.config.n_head,
        )  # fmt: skip
        k.linear_backward(self.dbranch, d.qkv_weight, d.qkv_bias, self.dqkv, a.ln1, w.qkv_weight, accumulate)
        k.layernorm_backward(
            self.dresidual, d.ln1_weight, d.ln1_bias, self.dbranch,
            a.residual1, a.ln1_mean, a.ln1_rstd, w.ln1_weight, accumulate,
        )  # fmt: skip


def activation_count(config, batch_size: int, sequence_length: int) -> int:
    """How many numbers a model that trains holds beside its parameters and gradients: those of GPT2._allocate."""
    rows, C = batch_size * sequence_length, config.n_embd
    layer = 16 * C + config.n_head + 4
    return rows * (config.n_layer * layer + 12 * C + config.padded_vocab_size + 4)


def new_model(config, kernels, batch_size: int, sequence_length: int, dtype=np.float32) -> GPT2:
    """A model with its own zeroed parameters and gradients: for tests and tools that need no strategy."""
    layout = Layout(config)
    parameters, gradients = (Parameters(layout, kernels.empty((layout.size,), dtype)) for _ in range(2))
    return GPT2(kernels, parameters, gradients, batch_size, sequence_length)
