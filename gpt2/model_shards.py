"""The tensors that a rank holds if several ranks share a model: its tensor-parallel shard of its pipeline stage.

Attention is cut by heads, the feed-forward block by columns, the vocabulary by rows (Shoeybi et al. 2019). If the
count is not divisible by the number of shards, shard sizes differ by at most one head, column or row. Tensors that are
not sharded are owned by tp rank 0. The token embedding, tied to the head, is owned by the first stage. So each
parameter has one owner: norms, checkpoints, optimizer state need no special cases. Other ranks have replicas of:

    LayerNorms, biases of attproj, fcproj   on all tp ranks
    token embedding (each shard's rows)     in the last stage
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from gpt2.config import GPT2Config


@dataclass(frozen=True)
class ModelShard:
    """Layers [first_layer, stop_layer) of a model, and tensor-parallel shard tp_rank of tp_size of each.

    is_first: this stage has the embeddings. is_last: it has the final LayerNorm and the head.
    """

    first_layer: int
    stop_layer: int
    is_first: bool = True
    is_last: bool = True
    tp_rank: int = 0
    tp_size: int = 1

    def share(self, count: int) -> tuple[int, int]:
        """Return this shard's [start, stop) of `count` heads, columns or rows."""
        return count * self.tp_rank // self.tp_size, count * (self.tp_rank + 1) // self.tp_size

    def share_size(self, count: int) -> int:
        start, stop = self.share(count)
        return stop - start


class OneShard:
    """The tensor-parallel group of a rank that holds whole tensors. dist/shard_sums.py has groups of several ranks."""

    def room(self, shape: tuple[int, ...]):
        """Return a buffer for partial sums that `sum` can use without a copy, or None."""
        return None

    def sum(self, rows):
        """Return the sums of rows (N, C) or (N,) over all shards. They are valid until the next call."""
        return rows

    def maximum(self, rows):
        """Replace rows (N,) by their maxima over all shards, and return them."""
        return rows


ONE_SHARD = OneShard()


def whole(config: GPT2Config) -> ModelShard:
    """Return the only shard of a model that is not cut."""
    return ModelShard(0, config.n_layer)


def model_shards(layers: tuple[int, ...], tp_size: int) -> list[ModelShard]:
    """Return all shards of a model, ordered by stage, then by tp rank. layers: how many each stage has."""
    shards = []
    first = 0
    for stage, count in enumerate(layers):
        is_first = stage == 0
        is_last = stage == len(layers) - 1
        for tp_rank in range(tp_size):
            shards.append(ModelShard(first, first + count, is_first, is_last, tp_rank, tp_size))
        first += count
    return shards


@dataclass(frozen=True)
class Tensor:
    """Where a named tensor lies in a flat buffer, and which box of the whole model's tensor it is.

    shape: as the kernels see it. box: [start, stop) along each axis of whole_shape (row-major in the buffer). They
    differ only for qkv, whose whole shape (3, C, C) separates queries, keys and values.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    whole_shape: tuple[int, ...]
    box: tuple[tuple[int, int], ...]

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)

    @property
    def decays(self) -> bool:
        """True for matrices and embeddings, to which weight decay applies; False for biases and LayerNorms."""
        return len(self.shape) > 1

    @property
    def is_rows(self) -> bool:
        """True if the box is whole rows of the tensor, so that it is contiguous there."""
        return self.box[1:] == whole_box(self.whole_shape)[1:]

    @property
    def box_shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.box)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as slices of the whole tensor."""
        return tuple(slice(*bounds) for bounds in self.box)


def whole_box(shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple((0, length) for length in shape)


def tensors(config: GPT2Config, shard: ModelShard) -> tuple[list[Tensor], list[Tensor]]:
    """Return (held, replicated): the tensors that a shard holds, and those that it uses but another rank holds.

    Each list is the layout of one flat buffer.
    """
    held = []
    replicated = []
    for name, whole_shape, cut_axis, other_stage_holds in _used(config, shard):
        if not other_stage_holds and (cut_axis is not None or shard.tp_rank == 0):
            held.append(_placed(held, config, shard, name, whole_shape, cut_axis))
        elif other_stage_holds or name != "wpe":
            replicated.append(_placed(replicated, config, shard, name, whole_shape, cut_axis))
    return held, replicated


def _used(config: GPT2Config, shard: ModelShard) -> Iterator[tuple[str, tuple[int, ...], int | None, bool]]:
    """Yield (name, whole shape, axis that is cut or None, whether another stage holds it) of each tensor that a shard
    computes with, in forward order."""
    C = config.n_embd
    embedding = config.padded_vocab_size, C
    if shard.is_last and not shard.is_first:
        yield "wte", embedding, 0, True
    if shard.is_first:
        yield "wte", embedding, 0, False
        yield "wpe", (config.context, C), None, False
    for layer in range(shard.first_layer, shard.stop_layer):
        for name, (whole_shape, cut_axis) in layer_tensors(config).items():
            yield f"layer.{layer}.{name}", whole_shape, cut_axis, False
    if shard.is_last:
        yield "lnf_weight", (C,), None, False
        yield "lnf_bias", (C,), None, False


def layer_tensors(config: GPT2Config) -> dict[str, tuple[tuple[int, ...], int | None]]:
    """Return {name: (whole shape, axis that shards cut)} of one layer's tensors, in forward order.

    Weights have shape (outputs, inputs), as in llm.c; qkv stacks three of them.
    """
    C = config.n_embd
    return {
        "ln1_weight": ((C,), None), "ln1_bias": ((C,), None),
        "qkv_weight": ((3, C, C), 1), "qkv_bias": ((3, C), 1),
        "attproj_weight": ((C, C), 1), "attproj_bias": ((C,), None),
        "ln2_weight": ((C,), None), "ln2_bias": ((C,), None),
        "fc_weight": ((4 * C, C), 0), "fc_bias": ((4 * C,), 0),
        "fcproj_weight": ((C, 4 * C), 1), "fcproj_bias": ((C,), None),
    }  # fmt: skip


def layer_shapes(config: GPT2Config) -> dict[str, tuple[int, ...]]:
    """Return {name: shape as the kernels see it} of one layer's tensors, in forward order."""
    return {name: as_kernels_see(name, whole_shape) for name, (whole_shape, _) in layer_tensors(config).items()}


def _placed(before: list[Tensor], config: GPT2Config, shard: ModelShard, name, whole_shape, cut_axis) -> Tensor:
    """Place a tensor after those already in the buffer."""
    box = list(whole_box(whole_shape))
    if cut_axis is not None:
        # Attention is cut between heads, wte and the feed-forward block between any two rows or columns.
        unit = config.head_size if "qkv" in name or "attproj" in name else 1
        box[cut_axis] = tuple(unit * bound for bound in shard.share(whole_shape[cut_axis] // unit))
    shape = as_kernels_see(name, tuple(stop - start for start, stop in box))
    return Tensor(name, shape, before[-1].stop if before else 0, whole_shape, tuple(box))


def as_kernels_see(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a tensor, or of a box, with queries, keys and values as rows of one matrix."""
    return (shape[0] * shape[1], *shape[2:]) if "qkv" in name else shape
