"""Allocate a model's arrays other than parameters and gradients, and count their bytes."""

import math
from types import SimpleNamespace

import numpy as np

from gpt2.config import GPT2Config
from gpt2.model_shards import ModelShard, whole


def widths(config: GPT2Config, shard: ModelShard) -> tuple[int, int]:
    """Return (channels of the shard's heads, its columns of the feed-forward block)."""
    return shard.share_size(config.n_head) * config.head_size, shard.share_size(4 * config.n_embd)


def new_activations(
    kernels, config: GPT2Config, shard: ModelShard, B: int, T: int, dtype, trains: bool
) -> SimpleNamespace:
    """Allocate the arrays that forward of a batch of (B, T) tokens keeps for backward.

    `layers`: the activations of each layer. `inputs` (B * T, C): where the first layer's residual stream begins. In the
    last stage also the arrays of the head. trains: False for a model that only runs forward. Each LayerNorm (ln1,
    ln2, lnf) has its input `residual`, its output `out`, and each row's `mean` and `rstd`.
    """
    N = B * T
    C = config.n_embd
    A, F = widths(config, shard)

    def new(*shape):
        return kernels.empty(shape, dtype)

    def operand(*shape):
        return kernels.empty(shape, kernels.operand_dtype or dtype)

    def of_rows(*shape):
        return kernels.empty(shape, np.promote_types(dtype, np.float32))

    def layernorm():
        return SimpleNamespace(residual=new(N, C), out=operand(N, C), mean=of_rows(N), rstd=of_rows(N))

    def layer():
        return SimpleNamespace(
            ln1=layernorm(),
            qkv=operand(N, 3 * A),
            attention=operand(N, A),
            logsumexp=of_rows(B, shard.share_size(config.n_head), T),
            ln2=layernorm(),
            gelu=operand(N, F),
            gelu_saved=operand(N, F),
        )

    kept = SimpleNamespace(exponentials=None, row_scale=None)
    kept.layers = [layer() for _ in range(shard.first_layer, shard.stop_layer)]
    if shard.is_last:
        kept.lnf = layernorm()
        kept.losses = of_rows(N)
        if trains:
            kept.exponentials = operand(N, shard.share_size(config.padded_vocab_size))
            kept.row_scale = of_rows(N)
    kept.inputs = kept.layers[0].ln1.residual if kept.layers else kept.lnf.residual
    return kept


def new_scratch(
    kernels, config: GPT2Config, shard: ModelShard, B: int, T: int, dtype, trains: bool, branch=None
) -> SimpleNamespace:
    """Allocate the arrays that all layers share. branch (B * T, C): memory for the branches; None allocates it.

    `branch`, `dbranch` and, without tensor parallelism, `dattention` share memory, as do `dqkv` and `dfc`: each is
    no longer needed when the next is written.
    """
    N = B * T
    C = config.n_embd
    A, F = widths(config, shard)
    s = SimpleNamespace()
    s.branch = kernels.empty((N, C), dtype) if branch is None else branch
    s.branch_bias = kernels.empty((C,), dtype)
    if trains:
        s.dbranch = s.branch
        s.dbranch_bias = kernels.empty((C,), dtype)
        s.dresidual = kernels.empty((N, C), dtype)
        operands = kernels.empty((N * max(3 * A, F),), kernels.operand_dtype or dtype)
        s.dqkv = operands[: N * 3 * A].reshape(N, 3 * A)
        s.dfc = operands[: N * F].reshape(N, F)
        s.dattention = s.dbranch if A == C else kernels.empty((N, A), dtype)
    return s


def activation_bytes(
    config: GPT2Config, B: int, T: int, shard: ModelShard | None = None, in_flight: int = 1, operand_bytes: int = 4
) -> int:
    """Return the bytes that a float32 model, or a shard of it, allocates to train on batches of (B, T) tokens.

    in_flight: microbatches between forward and backward at once. operand_bytes: bytes of a number in an operand.
    """
    shard = shard or whole(config)
    total = 0

    def count(shape, dtype):
        nonlocal total
        total += math.prod(shape) * np.dtype(dtype).itemsize
        return np.broadcast_to(np.zeros((), np.int8), shape)  # takes no memory

    counting = SimpleNamespace(empty=count, operand_dtype=None if operand_bytes == 4 else f"V{operand_bytes}")
    kind = config, shard, B, T, np.float32, True
    new_activations(counting, *kind)
    total *= in_flight
    # With several tensor-parallel shards, branches lie in memory that they share.
    new_scratch(counting, *kind, branch=None if shard.tp_size == 1 else np.empty(0))
    if not shard.is_last:
        count((B * T, config.n_embd), np.float32)  # the stage's outputs
    return total
