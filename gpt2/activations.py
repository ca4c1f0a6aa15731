"""The arrays of a model beside its parameters and gradients, and how many bytes they take."""

from types import SimpleNamespace

import numpy as np

from gpt2.config import GPT2Config
from gpt2.model_shards import ModelShard, whole


def widths(config: GPT2Config, shard: ModelShard) -> tuple[int, int]:
    """(channels of the shard's heads, its columns of the feed-forward block)."""
    return shard.share_size(config.n_head) * config.head_size, shard.share_size(4 * config.n_embd)


def new_activations(
    kernels, config: GPT2Config, shard: ModelShard, B: int, T: int, dtype, trains: bool
) -> SimpleNamespace:
    """Room for what one batch of (B, T) tokens leaves for backward: `layers`, of each half block what it began with and
    made; of the last stage what the head needs; `inputs` (B * T, C), where the stream of the first block begins.

    trains: False for a model that only runs forward.
    """
    N, C, (A, F) = B * T, config.n_embd, widths(config, shard)

    def new(*shape):
        return kernels.empty(shape, dtype)

    def operand(*shape):
        return kernels.empty(shape, kernels.operand_dtype or dtype)

    def of_rows(*shape):
        return kernels.empty(shape, np.promote_types(dtype, np.float32))

    def layer():
        return SimpleNamespace(
            residual1=new(N, C), ln1=operand(N, C), ln1_mean=of_rows(N), ln1_rstd=of_rows(N),
            qkv=operand(N, 3 * A), attention=operand(N, A), logsumexp=of_rows(B, shard.share_size(config.n_head), T),
            residual2=new(N, C), ln2=operand(N, C), ln2_mean=of_rows(N), ln2_rstd=of_rows(N),
            gelu=operand(N, F), gelu_saved=operand(N, F),
        )  # fmt: skip

    layers = [layer() for _ in range(shard.first_layer, shard.stop_layer)]
    kept = SimpleNamespace(layers=layers, exponentials=None, row_scale=None)
    if shard.is_last:
        kept.residual, kept.lnf, kept.lnf_mean, kept.lnf_rstd = new(N, C), operand(N, C), of_rows(N), of_rows(N)
        kept.losses = of_rows(N)
        if trains:
            kept.exponentials, kept.row_scale = operand(N, shard.share_size(config.padded_vocab_size)), of_rows(N)
    kept.inputs = kept.layers[0].residual1 if kept.layers else kept.residual
    return kept


def new_scratch(
    kernels, config: GPT2Config, shard: ModelShard, B: int, T: int, dtype, trains: bool, branch=None
) -> SimpleNamespace:
    """Arrays that all layers share. branch (B * T, C): memory for the branches; None allocates it."""
    N = B * T
    C = config.n_embd
    A, F = widths(config, shard)
    s = SimpleNamespace()
    s.branch = kernels.empty((N, C), dtype) if branch is None else branch
    s.branch_bias = kernels.empty((C,), dtype)
    if trains:
        s.dbranch = s.branch  # forward has used its branch before backward begins
        s.dbranch_bias = kernels.empty((C,), dtype)
        s.dresidual = kernels.empty((N, C), dtype)
        # The gradient of fc's output is used up before that of qkv's is made.
        operands = kernels.empty((N * max(3 * A, F),), kernels.operand_dtype or dtype)
        s.dqkv = operands[: N * 3 * A].reshape(N, 3 * A)
        s.dfc = operands[: N * F].reshape(N, F)
        s.dattention = s.dbranch if A == C else kernels.empty((N, A), dtype)
    return s


def activation_bytes(
    config,
    batch_size: int,
    sequence_length: int,
    shard: ModelShard | None = None,
    in_flight: int = 1,
    operand_bytes: int = 4,
) -> int:
    """What a float32 model, or a shard, that trains holds beside parameters and gradients: the arrays of GPT2.

    operand_bytes: of a number in what is only ever an operand of products.
    """  # fmt: skip
    shard, rows, C = shard or whole(config), batch_size * sequence_length, config.n_embd
    heads, (channels, columns) = shard.share_size(config.n_head), widths(config, shard)
    layers = shard.stop_layer - shard.first_layer
    kept, operands = layers * (2 * C + heads + 4), layers * (2 * C + 4 * channels + 2 * columns)
    if shard.is_last:
        kept, operands = kept + C + 4, operands + C + shard.share_size(config.padded_vocab_size)
    shared = 2 * C  # branch and dbranch, dresidual
    if shard.tp_size > 1:
        shared += channels - C  # dattention; the branch lies in memory that the parts share
    numbers = in_flight * kept + shared + (0 if shard.is_last else C)
    operands = in_flight * operands + max(3 * channels, columns)  # dqkv or dfc
    return rows * (4 * numbers + operand_bytes * operands) + 4 * 2 * C  # branch_bias and its gradient
