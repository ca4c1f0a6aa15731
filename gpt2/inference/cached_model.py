"""A GPT-2 that keeps the keys and values of the tokens it has read, so that one more token costs one row.

The prompt is one pass over all its rows. Each later token is the same pass with one row: its products are then
matrix-vector products, which BLAS notices, and read every weight once. Only on NumPy's kernels.
"""

import math
from types import SimpleNamespace

import numpy as np

from gpt2.kernels.numpy import loops
from gpt2.parameters import Parameters

ROWS = 128  # query rows whose scores exist at once


class CachedGPT2:
    """A GPT-2 that reads one sequence, on NumPy `kernels`; `length` tokens of it are in the cache.

    sequence_length: T, the most tokens that it reads, at most the model's context, which is the default. Beside the
    parameters it holds keys and values (2 L T C numbers) and one layer's activations for T tokens.
    """

    def __init__(self, kernels, parameters: Parameters, sequence_length: int | None = None):
        self.kernels, self.parameters, self.length = kernels, parameters, 0
        self.config = config = parameters.layout.config
        self.sequence_length = T = sequence_length or config.context
        C, dtype = config.n_embd, parameters.flat.dtype

        def new(*shape):
            return kernels.empty(shape, dtype)

        heads = (config.n_head, T, config.head_size)
        self._keys, self._values = ([new(*heads) for _ in range(config.n_layer)] for _ in range(2))
        self._logits, self._logsumexp = new(1, config.padded_vocab_size), new(config.n_head, T)
        self._buffers = {
            "stream": new(T, C), "branch": new(T, C), "normalized": new(T, C), "mean": new(T), "rstd": new(T),
            "qkv": new(T, 3 * C), "attention": new(T, C), "gelu": new(T, 4 * C), "slope": new(T, 4 * C),
        }  # fmt: skip

    def forward(self, tokens) -> np.ndarray:
        """Logits (V,) of the token that follows `tokens` (n,), n >= 1, which follow those in the cache and join them.

        A view, valid until the next call. ValueError: the cache would hold more than T tokens.
        """
        tokens = np.asarray(tokens, np.int32)
        n, k, p = len(tokens), self.kernels, self.parameters
        if not 0 < n <= self.sequence_length - self.length:
            raise ValueError(f"{n} tokens after {self.length}, expected at most {self.sequence_length} in all")
        a = SimpleNamespace(**{name: buffer[:n] for name, buffer in self._buffers.items()})
        k.embedding_forward(a.stream[None], tokens[None], p.wte, p.wpe[self.length :])
        a.branch[:] = 0.0  # no branch comes before the first layer
        for w, keys, values in zip(p.layers, self._keys, self._values, strict=True):
            self._normalize(a, w.ln1_weight, w.ln1_bias)
            k.linear_forward(a.qkv, a.normalized, w.qkv_weight, w.qkv_bias)
            self._attend(a.attention, a.qkv, keys, values)
            k.linear_forward(a.branch, a.attention, w.attproj_weight, w.attproj_bias)
            self._normalize(a, w.ln2_weight, w.ln2_bias)
            k.linear_gelu_forward(a.gelu, a.slope, a.normalized, w.fc_weight, w.fc_bias)
            k.linear_forward(a.branch, a.gelu, w.fcproj_weight, w.fcproj_bias)
        self._normalize(a, p.lnf_weight, p.lnf_bias)
        self.length += n
        k.linear_forward(self._logits, a.normalized[-1:], p.wte, None)
        return self._logits[0, : self.config.vocab_size]

    def forget(self) -> None:
        """Empty the cache."""
        self.length = 0

    def _normalize(self, a, weight, bias) -> None:
        """stream += branch, normalized = LayerNorm(stream)."""
        self.kernels.residual_layernorm_forward(
            a.stream, a.normalized, a.mean, a.rstd, a.stream, a.branch, weight, bias
        )

    def _attend(self, out, qkv, keys, values) -> None:
        """out (n, C): causal attention of the new queries to all keys; qkv (n, 3C), keys, values (H, T, d)."""
        n, H, d = len(qkv), self.config.n_head, self.config.head_size
        queries, *new = qkv.reshape(n, 3, H, d).transpose(1, 2, 0, 3)
        keys[:, self.length : self.length + n], values[:, self.length : self.length + n] = new
        out_heads = out.reshape(n, H, d).transpose(1, 0, 2)
        cores, scale = self.kernels.device, qkv.dtype.type(1.0 / math.sqrt(d))

        def some_heads(low, high):
            for start in range(0, n, ROWS):
                stop = min(start + ROWS, n)
                seen = self.length + stop
                p = cores.scratch("scores", (high - low, stop - start, seen), qkv.dtype)
                np.matmul(queries[low:high, start:stop], keys[low:high, :seen].transpose(0, 2, 1), out=p)
                loops.causal_softmax(p, self._logsumexp[low:high], self.length + start, scale)
                np.matmul(p, values[low:high, :seen], out=out_heads[low:high, start:stop])

        cores.for_parts(H, some_heads)
