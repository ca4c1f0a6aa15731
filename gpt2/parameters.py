"""All parameters in one flat buffer, layer by layer in forward order; named tensors are views of it.

Whatever exchanges, updates, clips or saves works on flat ranges [start, stop) of this buffer and never needs a name.
Gradients, and AdamW's two moments, are buffers of the same layout.
"""

import math
from bisect import bisect_left
from functools import cached_property
from itertools import pairwise
from operator import attrgetter
from types import SimpleNamespace

import numpy as np

from gpt2.config import GPT2Config
from gpt2.model_shards import ModelShard, Tensor, layer_shapes, tensors, whole

LOOKED_AT = 1 << 18  # elements: a block that stays in a core's cache
HEAD_ROWS = 1024  # of the token embedding, which is the head: as many as a few milliseconds of its products
# What hooks are told instead of a range where a model is about to use, or has the gradients of, the rows of the token
# embedding that the step looks up (Layout.split_ranges): no stretch of the buffer, so an empty one.
LOOKUP = (0, 0)
INITIAL_STD = 0.02  # Radford et al. 2019; residual projections get INITIAL_STD / sqrt(2 L)


def no_hook(start: int, stop: int) -> None:
    """Do nothing when a range is about to be used, has been filled, or has its final gradients."""


class Layout:
    """Where each tensor lies: `count` parameters in `size` elements, padded at the end to a multiple of `multiple_of`.

    Tensor names: wte (Vp, C), wpe (context, C), layer.0.ln1_weight ... layer.{L-1}.fcproj_bias, lnf_weight, lnf_bias;
    of a shard those that it holds. `borrowed`: others that it uses, placed in a buffer of their own (borrowed_size,).
    """

    def __init__(self, config: GPT2Config, multiple_of: int = 1, shard: ModelShard | None = None):
        self.config, self.shard = config, shard or whole(config)
        self.tensors, self.replicated = tensors(config, self.shard)
        self.count, self.replicated_size = (found[-1].stop if found else 0 for found in (self.tensors, self.replicated))
        self.size = -(-self.count // multiple_of) * multiple_of

    @cached_property
    def by_name(self) -> dict[str, Tensor]:
        return {tensor.name: tensor for tensor in self.tensors}

    @cached_property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """What is used together, in order: the embeddings, each layer, the final LayerNorm; the last with the pad.

        A shard has those of its stage. The last may be empty: only part 0 holds the final LayerNorm.
        """
        starts = [0] if self.shard.is_first else []
        starts += [self._start_of(layer, ("ln1_weight", "qkv_weight")) for layer in self._layers]
        if self.shard.is_last:
            starts.append(self.by_name["lnf_weight"].start if self.shard.tp_rank == 0 else self.count)
        return tuple(pairwise([*starts, self.size]))

    @property
    def held_ranges(self) -> tuple[tuple[int, int], ...]:
        """The ranges that are not empty."""
        return tuple(part for part in self.ranges if part[0] < part[1])

    @property
    def _layers(self) -> range:
        return range(self.shard.first_layer, self.shard.stop_layer)

    def _start_of(self, layer: int, names: tuple[str, ...]) -> int:
        """Where the first of these tensors of a layer lies that the shard holds."""
        found = (self.by_name.get(f"layer.{layer}.{name}") for name in names)
        return next(tensor.start for tensor in found if tensor)

    @cached_property
    def split_ranges(self) -> tuple[tuple[int, int], ...]:
        """What is used together, in order, where the token embedding is split by its two uses: the rows that are looked
        up, the position embedding, each layer, the final LayerNorm, and the head: the token embedding block by block.

        Of a whole model.
        """
        step = HEAD_ROWS * self.config.n_embd
        (_, embeddings_stop), *others = self.ranges
        head_stop = self.by_name["wte"].stop
        blocks = [(low, min(low + step, head_stop)) for low in range(0, head_stop, step)]
        return (LOOKUP, (head_stop, embeddings_stop), *others, *blocks)

    @property
    def head_blocks(self) -> tuple[tuple[int, int], ...]:
        """The last of split_ranges: of the token embedding."""
        return self.split_ranges[1 + len(self.ranges) :]

    def tensors_in(self, start: int, stop: int) -> list[Tensor]:
        """The tensors that begin in [start, stop), in order."""
        low, high = (bisect_left(self.tensors, place, key=attrgetter("start")) for place in (start, stop))
        return self.tensors[low:high]

    def tensor_at(self, element: int) -> str:
        """The name of the tensor that an element of the flat buffer belongs to, or "the pad"."""
        return next((tensor.name for tensor in self.tensors if tensor.start <= element < tensor.stop), "the pad")

    @property
    def layer_ranges(self) -> tuple[tuple[int, int], ...]:
        """Those of `ranges` that are layers."""
        first = 1 if self.shard.is_first else 0
        return self.ranges[first : first + len(self._layers)]

    @cached_property
    def layer_halves(self) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """Each layer's range in two: (attention, feed-forward), each with the LayerNorm before it."""
        halves = []
        for layer, (start, stop) in zip(self._layers, self.layer_ranges, strict=True):
            middle = self._start_of(layer, ("ln2_weight", "fc_weight"))
            halves.append(((start, middle), (middle, stop)))
        return halves

    def final_ranges(self, split: bool = False) -> tuple[tuple[int, int], ...]:
        """The flat ranges in the order in which backward makes their gradients final.

        A layer comes in two halves. The embeddings come last: the token embedding is also the head, so its gradient has
        two terms, and the second is added at the very end. With `split` (as split_ranges) the head's term comes first,
        from its last block down; the sparse embedding gradient is separate, and comes last.
        """
        final = [self.ranges[-1]] if self.shard.is_last else []
        for attention, feed_forward in reversed(self.layer_halves):
            final += [feed_forward, attention]
        if split:
            return (*reversed(self.head_blocks), *final, self.split_ranges[1], LOOKUP)
        if self.shard.is_first:
            final.append(self.ranges[0])
        return tuple(final)

    def decaying_ranges(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The parts of [start, stop) that weight decay is for, in order; neighbours joined."""
        ranges = []
        for tensor in self.tensors:
            low, high = max(start, tensor.start), min(stop, tensor.stop)
            if not tensor.decays or low >= high:
                continue
            if ranges and ranges[-1][1] == low:
                low = ranges.pop()[0]
            ranges.append((low, high))
        return ranges


class Parameters:
    """A flat buffer and its named views: `.flat` (size,), `.wte`, `.layers[i].qkv_weight`, `.lnf_weight`, ...

    The buffer may be anything with a shape and a dtype that gives a view of flat[start:stop] within one of the layout's
    `ranges`. Not all of it need exist at once. Of a shard, layers are counted from its first; what it borrows lies in
    `borrowed` (borrowed_size,), where there is room for that, and what is nowhere is None. ValueError: another size.
    """

    def __init__(self, layout: Layout, flat, borrowed=None):
        if flat.shape != (layout.size,):
            raise ValueError(f"flat buffer is {flat.shape}, the layout needs ({layout.size},)")
        self.layout, self.flat, self.replicated = layout, flat, borrowed
        nothing, shard = dict.fromkeys(layer_shapes(layout.config)), layout.shard
        self.layers = [SimpleNamespace(**nothing) for _ in range(shard.first_layer, shard.stop_layer)]
        self.wte = self.wpe = self.lnf_weight = self.lnf_bias = None
        for buffer, placed in ((flat, layout.tensors), (borrowed, layout.replicated if borrowed is not None else ())):
            for tensor in placed:
                *path, name = tensor.name.split(".")
                owner = self.layers[int(path[1]) - shard.first_layer] if path else self
                setattr(owner, name, buffer[tensor.start : tensor.stop].reshape(tensor.shape))

    def view(self, name: str):
        """Of a tensor that is held."""
        tensor = self.layout.by_name[name]
        return self.flat[tensor.start : tensor.stop].reshape(tensor.shape)

    @classmethod
    def zeros(cls, layout: Layout) -> "Parameters":
        return cls(layout, np.zeros(layout.size, np.float32), np.zeros(layout.replicated_size, np.float32))


def first_not_finite(values: np.ndarray) -> int | None:
    """The index of the first of some flat float32 values that is nan or infinite, None if all are numbers.

    It takes a quarter of the time of a checksum, and works block by block, so it needs no memory to speak of.
    """
    for start in range(0, len(values), LOOKED_AT):
        are_finite = np.isfinite(values[start : start + LOOKED_AT])
        if not are_finite.all():
            return start + int(np.argmin(are_finite))
    return None


def initialize(parameters: Parameters, seed: int, filled=no_hook) -> None:
    """GPT-2's initialization, the same on every rank for one seed: matrices N(0, 0.02), LayerNorms 1, biases 0.

    One stream of random numbers is drawn for the whole model, and a shard keeps what it holds of it: a model begins
    with the same bits however it is cut. Each range of the layout is filled after the one before; filled(start, stop)
    follows each that is not empty.
    """
    layout, random = parameters.layout, np.random.default_rng(seed)
    left = list(layout.held_ranges)

    def fill_up_to(element):
        while left and left[0][1] <= element:
            filled(*left.pop(0))
            if left:
                parameters.flat[slice(*left[0])].fill(0.0)

    parameters.flat[slice(*left[0])].fill(0.0)
    for tensor in Layout(layout.config).tensors:
        own = layout.by_name.get(tensor.name)
        if own:
            fill_up_to(own.start)
        if tensor.decays:
            _draw(random, tensor, own, parameters, _deviation(layout.config, tensor.name))
        elif own and tensor.name.endswith("_weight"):
            parameters.view(own.name)[:] = 1.0
    fill_up_to(layout.size)


def _deviation(config: GPT2Config, name: str) -> float:
    """The standard deviation of a matrix's first values."""
    return INITIAL_STD / math.sqrt(2 * config.n_layer) if name.endswith("proj_weight") else INITIAL_STD


def _draw(random, tensor: Tensor, own: Tensor | None, parameters: Parameters, deviation: float) -> None:
    """Draw a tensor of the whole model, and keep the shard's box of it; own: None if it has none.

    Rows that are drawn one after another are the same numbers as a tensor at once. wte's pad rows become 0.
    """
    if own and own.is_whole:
        random.standard_normal(out=parameters.view(own.name), dtype=np.float32)
    else:
        rows, *rest = tensor.whole_shape
        step = max(1, LOOKED_AT // math.prod(rest))
        for low in range(0, rows, step):
            drawn = random.standard_normal((min(step, rows - low), *rest), dtype=np.float32)
            if own:
                _keep_rows(parameters.view(own.name).reshape(own.box_shape), own, low, drawn)
    if own:
        parameters.view(own.name)[:] *= np.float32(deviation)
    if own and tensor.name == "wte":
        parameters.wte[max(0, parameters.layout.config.vocab_size - own.box[0][0]) :] = 0.0


def _keep_rows(view: np.ndarray, own: Tensor, first: int, rows: np.ndarray) -> None:
    """Of some rows of a whole tensor, number `first` and on, put those in the shard's box into its view, box_shape."""
    begin = own.box[0][0]
    low, high = max(first, begin), min(first + len(rows), own.box[0][1])
    if low < high:
        view[low - begin : high - begin] = rows[(slice(low - first, high - first), *own.slices[1:])]
