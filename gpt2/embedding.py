"""The tied token embedding: it embeds the tokens, and it is the weight of the model's head.

So its gradient has two terms. Backward first computes the head's term, and adds the embedding's term at the very end.
"""

from gpt2.parameters import Parameters


class TiedEmbedding:
    """Token and position embeddings, and the head, which uses the token embedding again.

    before_use(start, stop) and gradients_final(start, stop): hooks as in gpt2.model.GPT2. Keyword options go to the
    kernels: they are for embeddings of which a rank holds only a part, or which arrive in parts.
    """

    def __init__(self, kernels, parameters: Parameters, gradients: Parameters | None, before_use):
        self.kernels = kernels
        self.parameters = parameters
        self.gradients = gradients
        self.before_use = before_use
        self.layout = parameters.layout

    def embed(self, out, tokens, **options) -> None:
        """Compute out (N, C) = wte[tokens] + wpe, of tokens (B, T)."""
        p = self.parameters
        self.before_use(*self.layout.ranges[0])
        self.kernels.embedding_forward(out.reshape(*tokens.shape, -1), tokens, p.wte, p.wpe, **options)

    def embed_backward(self, dout, tokens, accumulate: bool, gradients_final, **options) -> None:
        """Add dwte[tokens] += dout (N, C), after classify_backward; dwpe = or += dout, summed over the batch."""
        d = self.gradients
        dout = dout.reshape(*tokens.shape, -1)
        self.kernels.embedding_backward(d.wte, d.wpe, dout, tokens, accumulate, **options)
        gradients_final(*self.layout.ranges[0])

    def classify(self, kept, targets, gradient_scale: float, trains: bool, **options) -> None:
        """Compute kept.losses (N,) = cross entropy of kept.lnf.out (N, C) @ wte.T against targets (B, T).

        trains: also keep what classify_backward needs, with the gradient times gradient_scale.
        """
        exponentials = kept.exponentials if trains else None
        row_scale = kept.row_scale if trains else None
        self.kernels.classifier_forward(
            kept.losses, exponentials, row_scale, kept.lnf.out, self.parameters.wte, targets.reshape(-1),
            self.layout.config.vocab_size, gradient_scale, **options,
        )  # fmt: skip

    def classify_backward(self, dinputs, kept, accumulate: bool, gradients_final, **options) -> None:
        """Compute dinputs (N, C) = dlogits @ wte;  dwte = or += dlogits.T @ kept.lnf.out.

        classify stored dlogits as kept.exponentials and kept.row_scale.
        """
        self.kernels.classifier_backward(
            dinputs, self.gradients.wte, kept.exponentials, kept.row_scale, kept.lnf.out, self.parameters.wte,
            accumulate, **options,
        )  # fmt: skip


class SparseEmbedding(TiedEmbedding):
    """A tied embedding whose two uses are exchanged separately: few rows are embedded, but the head uses all.

    lookup (dist/sparse_gradient.py) has the rows that a step embeds. `lookup.values` (rows, C) holds their parameters
    in forward, once before_use has returned, and the sparse embedding gradient in backward, from the first
    begin_gradients() on. gradients.wte holds only the head's term. `lookup.numbers(tokens)` is the row of each
    token. Hooks get the layout's split ranges. The head's range comes in blocks, so that a block's exchange
    overlaps with the products of other blocks. Without `lookup.has_parameters`, forward runs as in the
    base class, on the whole wte.
    """

    def __init__(self, kernels, parameters: Parameters, gradients: Parameters | None, before_use, lookup):
        super().__init__(kernels, parameters, gradients, before_use)
        self.lookup = lookup

    def embed(self, out, tokens) -> None:
        if not self.lookup.has_parameters:
            super().embed(out, tokens)
            return
        self.before_use(*self.layout.split_ranges[0])
        rows = self.lookup.numbers(tokens)
        self.kernels.embedding_forward(out.reshape(*tokens.shape, -1), rows, self.lookup.values, self.parameters.wpe)

    def embed_backward(self, dout, tokens, accumulate: bool, gradients_final) -> None:
        if not accumulate:
            self.lookup.begin_gradients()
        rows = self.lookup.numbers(tokens)
        dout = dout.reshape(*tokens.shape, -1)
        self.kernels.embedding_backward(self.lookup.values, self.gradients.wpe, dout, rows, accumulate)
        gradients_final(*self.layout.split_ranges[0])

    def classify(self, kept, targets, gradient_scale: float, trains: bool) -> None:
        options = {}
        if self.lookup.has_parameters:
            target_rows = self.lookup.values, self.lookup.numbers(targets)
            options = {"blocks": self._blocks_in_use(), "target_rows": target_rows}
        super().classify(kept, targets, gradient_scale, trains, **options)

    def classify_backward(self, dinputs, kept, accumulate: bool, gradients_final) -> None:
        blocks = self._final_blocks(gradients_final)
        super().classify_backward(dinputs, kept, accumulate, gradients_final, blocks=blocks)

    def _blocks_in_use(self):
        """Yield the rows of each block of wte as soon as they may be used."""
        for start, stop in self.layout.head_blocks:
            self.before_use(start, stop)
            yield start // self.layout.config.n_embd, stop // self.layout.config.n_embd

    def _final_blocks(self, gradients_final):
        """Yield the rows of each block of wte, the last first. A block's gradient is final when the next is taken."""
        for start, stop in reversed(self.layout.head_blocks):
            yield start // self.layout.config.n_embd, stop // self.layout.config.n_embd
            gradients_final(start, stop)
