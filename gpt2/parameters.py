"""All parameters in one flat buffer, layer by layer in forward order. Named tensors are views of it.

Exchanges, updates, clipping and checkpoints work on flat ranges [start, stop) of this buffer and need no names.
Gradients and AdamW's two moments are buffers of the same layout.
"""

import math
from functools import cached_property
from itertools import pairwise
from types import SimpleNamespace

import numpy as np

from gpt2.config import GPT2Config
from gpt2.model_shards import ModelShard, Tensor, layer_shapes, tensors, whole

BLOCK_ELEMENTS = 1 << 18  # a block that stays in a core's cache
HEAD_ROWS = 1024  # rows of the token embedding in a block of the head: a few milliseconds of products
INITIAL_STD = 0.02  # Radford et al. 2019; residual projections get INITIAL_STD / sqrt(2 L)


def no_hook(start: int, stop: int) -> None:
    """Do nothing: the default hook for ranges that are about to be used, were filled, or have final gradients."""


class Layout:
    """Where each tensor lies in the flat buffer: `count` parameters, padded to `size`, a multiple of `multiple_of`.

    Tensor names: wte (Vp, C), wpe (context, C), layer.0.ln1_weight ... layer.{L-1}.fcproj_bias, lnf_weight, lnf_bias.
    The tensors that a model shard holds are in `tensors`. Tensors that it uses but another rank holds are in
    `replicated`, the layout of a second buffer (replicated_size,).
    """

    def __init__(self, config: GPT2Config, multiple_of: int = 1, shard: ModelShard | None = None):
        self.config = config
        self.shard = shard or whole(config)
        self.tensors, self.replicated = tensors(config, self.shard)
        self.count = self.tensors[-1].stop if self.tensors else 0
        self.replicated_size = self.replicated[-1].stop if self.replicated else 0
        self.size = -(-self.count // multiple_of) * multiple_of

    @cached_property
    def by_name(self) -> dict[str, Tensor]:
        return {tensor.name: tensor for tensor in self.tensors}

    @cached_property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The ranges that forward uses, in order: the embeddings, each layer, the final LayerNorm with the pad.

        A model shard has the ranges of its stage. The last may be empty, as only tp rank 0 holds the final LayerNorm.
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

    @property
    def matrices(self) -> tuple[tuple[int, int, int], ...]:
        """The (start, rows, columns) of each tensor that is a matrix."""
        return tuple((tensor.start, *tensor.shape) for tensor in self.tensors if len(tensor.shape) == 2)

    def _start_of(self, layer: int, names: tuple[str, ...]) -> int:
        """Return the start of the first of a layer's tensors `names` that this shard holds."""
        found = (self.by_name.get(f"layer.{layer}.{name}") for name in names)
        return next(tensor.start for tensor in found if tensor)

    @cached_property
    def split_ranges(self) -> tuple[tuple[int, int], ...]:
        """The ranges that forward of a whole model uses with a sparse embedding gradient, in order.

        Position embedding, each layer, final LayerNorm, and the token embedding as the head, block by block. Forward
        begins with the rows that a step embeds, which lie outside the flat buffer."""
        step = HEAD_ROWS * self.config.n_embd
        (_, embeddings_stop), *others = self.ranges
        head_stop = self.by_name["wte"].stop
        blocks = [(low, min(low + step, head_stop)) for low in range(0, head_stop, step)]
        return ((head_stop, embeddings_stop), *others, *blocks)

    @property
    def head_blocks(self) -> tuple[tuple[int, int], ...]:
        """The blocks of the token embedding in split_ranges."""
        return self.split_ranges[len(self.ranges) :]

    def tensors_in(self, start: int, stop: int) -> list[Tensor]:
        """Return the tensors that begin in [start, stop), in order."""
        return [tensor for tensor in self.tensors if start <= tensor.start < stop]

    def tensor_at(self, element: int) -> str:
        """Return the name of the tensor that holds an element of the flat buffer, or "the pad"."""
        return next((tensor.name for tensor in self.tensors if tensor.start <= element < tensor.stop), "the pad")

    @property
    def layer_ranges(self) -> tuple[tuple[int, int], ...]:
        """The ranges of the layers."""
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
        """Return the flat ranges in the order in which backward makes their gradients final.

        A layer comes in two halves. The embeddings come last: the token embedding is also the head, so its gradient has
        two terms, and the second is added at the very end. With `split` (as in split_ranges) the head comes first, its
        last block before the others; the sparse embedding gradient is outside the flat buffer.
        """
        final = [self.ranges[-1]] if self.shard.is_last else []
        for attention, feed_forward in reversed(self.layer_halves):
            final += [feed_forward, attention]
        if split:
            return (*reversed(self.head_blocks), *final, self.split_ranges[0])
        if self.shard.is_first:
            final.append(self.ranges[0])
        return tuple(final)

    def decaying_ranges(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the ranges within [start, stop) that weight decay applies to, in order; neighbours are joined."""
        ranges = []
        for tensor in self.tensors:
            low = max(start, tensor.start)
            high = min(stop, tensor.stop)
            if not tensor.decays or low >= high:
                continue
            if ranges and ranges[-1][1] == low:
                low = ranges.pop()[0]
            ranges.append((low, high))
        return ranges


class Parameters:
    """A flat buffer and its named views: `.flat` (size,), `.wte`, `.layers[i].qkv_weight`, `.lnf_weight`, ...

    The buffer may be any object with a shape and a dtype whose flat[start:stop] is a view, within one of the layout's
    `ranges`: not all of it need exist at once. In a model shard, layers[0] is the shard's first layer. Tensors that it
    does not hold are views of `replicated` (replicated_size,), or None without it. ValueError: flat has another size.
    """

    def __init__(self, layout: Layout, flat, replicated=None):
        if flat.shape != (layout.size,):
            raise ValueError(f"flat buffer is {flat.shape}, the layout needs ({layout.size},)")
        self.layout = layout
        self.flat = flat
        self.replicated = replicated
        nothing = dict.fromkeys(layer_shapes(layout.config))
        self.layers = [SimpleNamespace(**nothing) for _ in layout.layer_ranges]
        self.wte = self.wpe = self.lnf_weight = self.lnf_bias = None
        self._name_views(flat, layout.tensors)
        if replicated is not None:
            self._name_views(replicated, layout.replicated)

    def _name_views(self, buffer, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            *path, name = tensor.name.split(".")
            owner = self.layers[int(path[1]) - self.layout.shard.first_layer] if path else self
            setattr(owner, name, buffer[tensor.start : tensor.stop].reshape(tensor.shape))

    def view(self, name: str):
        """Return the view of a tensor that this shard holds."""
        tensor = self.layout.by_name[name]
        return self.flat[tensor.start : tensor.stop].reshape(tensor.shape)

    @classmethod
    def zeros(cls, layout: Layout) -> "Parameters":
        return cls(layout, np.zeros(layout.size, np.float32), np.zeros(layout.replicated_size, np.float32))


def first_not_finite(values: np.ndarray) -> int | None:
    """Return the index of the first of the flat float32 values that is nan or infinite, or None."""
    for start in range(0, len(values), BLOCK_ELEMENTS):
        are_finite = np.isfinite(values[start : start + BLOCK_ELEMENTS])
        if not are_finite.all():
            return start + int(np.argmin(are_finite))
    return None


def initialize(parameters: Parameters, seed: int, filled=no_hook) -> None:
    """Initialize as in GPT-2, equally on every rank for one seed: matrices N(0, 0.02), LayerNorms 1, biases 0.

    Every rank draws the random numbers of the whole model and keeps those of its shard. So a model begins with the same
    bits however it is cut. The layout's ranges are filled in order; filled(start, stop) follows each nonempty one.
    """
    layout = parameters.layout
    config = layout.config
    random = np.random.default_rng(seed)
    whole_model = iter(Layout(config).tensors)
    for start, stop in layout.held_ranges:
        parameters.flat[start:stop].fill(0.0)
        for own in layout.tensors_in(start, stop):
            while (tensor := next(whole_model)).name != own.name:
                _draw(random, tensor, None)
            view = parameters.view(own.name)
            if own.decays:
                _draw(random, own, view.reshape(own.box_shape))
                is_projection = own.name.endswith("proj_weight")  # onto the residual stream
                view *= np.float32(INITIAL_STD / math.sqrt(2 * config.n_layer) if is_projection else INITIAL_STD)
            elif own.name.endswith("_weight"):
                view[:] = 1.0
            if own.name == "wte":
                view[max(0, config.vocab_size - own.box[0][0]) :] = 0.0  # the pad rows
        filled(start, stop)


def _draw(random, tensor: Tensor, view: np.ndarray | None) -> None:
    """Draw N(0, 1) for a whole tensor that is a matrix. Keep the tensor's box in `view` (box_shape), unless None.

    Drawing rows one after another gives the same numbers as drawing the tensor at once.
    """
    if not tensor.decays:
        return
    rows, *rest = tensor.whole_shape
    begin, end = tensor.box[0]
    step = max(1, BLOCK_ELEMENTS // math.prod(rest))
    for first in range(0, rows, step):
        drawn = random.standard_normal((min(step, rows - first), *rest), dtype=np.float32)
        low = max(first, begin)
        high = min(first + step, end)
        if view is not None and low < high:
            view[low - begin : high - begin] = drawn[(slice(low - first, high - first), *tensor.slices[1:])]
