"""A GPT-2 with a key-value cache: the forward pass of a new token computes only that token's row.

One forward pass reads all tokens of the prompt. Each later token takes a pass over a single row, whose
matrix-vector products read every weight once. Runs on any kernel set.
"""

from types import SimpleNamespace

import numpy as np

from gpt2.parameters import Parameters


class CachedGPT2:
    """A GPT-2 that reads one sequence, `length` tokens of which are in the cache.

    sequence_length: T, how many tokens the cache holds, at most the model's context (the default). The constructor
    allocates all memory: the cache (3 L T C numbers) and one layer's activations for T tokens.
    """

    def __init__(self, kernels, parameters: Parameters, sequence_length: int | None = None):
        self.kernels = kernels
        self.parameters = parameters
        self.length = 0
        config = parameters.layout.config
        T = sequence_length or config.context
        C = config.n_embd
        self.config = config
        self.sequence_length = T
        dtype = parameters.flat.dtype

        def new(*shape):
            return kernels.empty(shape, dtype)

        def of_rows(*shape):
            return kernels.empty(shape, np.promote_types(dtype, np.float32))

        self._cache = [new(T, 3 * C) for _ in range(config.n_layer)]  # queries, keys, values, as attention reads them
        self._attention = new(T, C)
        self._logsumexp = of_rows(config.n_head * T)
        self._logits = new(1, config.padded_vocab_size)
        self._no_bias = new(C)
        self._buffers = {
            "stream": new(T, C), "branch": new(T, C), "normalized": new(T, C), "mean": of_rows(T), "rstd": of_rows(T),
            "gelu": new(T, 4 * C), "gelu_saved": new(T, 4 * C),
        }  # fmt: skip

    def forward(self, tokens) -> np.ndarray:
        """Append `tokens` (n,), n >= 1, to the cache and return the logits (V,) of the next token.

        The logits are in host memory, float32 at least, and valid until the next call. ValueError: the cache is full.
        """
        tokens = np.asarray(tokens, np.int32)
        n = len(tokens)
        k = self.kernels
        p = self.parameters
        if not 0 < n <= self.sequence_length - self.length:
            raise ValueError(f"{n} tokens after {self.length}, expected at most {self.sequence_length} in all")
        a = SimpleNamespace(**{name: buffer[:n] for name, buffer in self._buffers.items()})
        k.embedding_forward(a.stream[None], tokens[None], p.wte, p.wpe[self.length :])
        a.branch[:] = 0.0  # the first layer has no branch before it
        bias = self._no_bias
        for w, cache in zip(p.layers, self._cache, strict=True):
            self._normalize(a, bias, w.ln1_weight, w.ln1_bias)
            k.linear_forward(cache[self.length : self.length + n], a.normalized, w.qkv_weight, w.qkv_bias)
            k.linear_forward(a.branch, self._attend(cache, n), w.attproj_weight, None)
            self._normalize(a, w.attproj_bias, w.ln2_weight, w.ln2_bias)
            k.linear_gelu_forward(a.gelu, a.gelu_saved, a.normalized, w.fc_weight, w.fc_bias)
            k.linear_forward(a.branch, a.gelu, w.fcproj_weight, None)
            bias = w.fcproj_bias
        self._normalize(a, bias, p.lnf_weight, p.lnf_bias)
        self.length += n
        k.linear_forward(self._logits, a.normalized[-1:], p.wte, None)
        return k.to_host(self._logits)[0, : self.config.vocab_size]

    def forget(self) -> None:
        """Empty the cache."""
        self.length = 0

    def _normalize(self, a, branch_bias, weight, bias) -> None:
        """Compute stream += branch + branch_bias, normalized = LayerNorm(stream)."""
        self.kernels.residual_layernorm_forward(
            a.stream, a.normalized, a.mean, a.rstd, a.stream, a.branch, branch_bias, weight, bias
        )

    def _attend(self, cache, n: int):
        """Return causal attention (n, C) of the n newest rows of the cache (T, 3C) to all its rows."""
        seen = self.length + n
        H = self.config.n_head
        out = self._attention[:seen]
        logsumexp = self._logsumexp[: H * seen].reshape(1, H, seen)
        self.kernels.attention_forward(out[None], logsumexp, cache[None, :seen], H, self.length)
        return out[self.length :]
