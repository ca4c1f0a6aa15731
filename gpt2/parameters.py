"""All parameters in one flat buffer, layer by layer in forward order; named tensors are views of it.

Whatever exchanges, updates, clips or saves works on flat ranges [start, stop) of this buffer and never needs a name.
Gradients, and AdamW's two moments, are buffers of the same layout.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import attrgetter
from types import SimpleNamespace

import numpy as np

from gpt2.config import GPT2Config

LOOKED_AT = 1 << 18  # elements: a piece that stays in a core's cache
INITIAL_STD = 0.02  # Radford et al. 2019; residual projections get INITIAL_STD / sqrt(2 L)


def no_hook(start: int, stop: int) -> None:
    """Do nothing when a range is about to be used, has been filled, or has its final gradients."""


@dataclass(frozen=True)
class Tensor:
    """One named tensor's place in the flat buffer."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)

    @property
    def decays(self) -> bool:
        """Weight decay is for matrices and embeddings, not for biases and LayerNorms."""
        return len(self.shape) > 1


def layer_shapes(config: GPT2Config) -> dict[str, tuple[int, ...]]:
    """One transformer block's tensors, in the order forward uses them; a weight is (outputs, inputs) as in llm.c."""
    C = config.n_embd
    return {
        "ln1_weight": (C,), "ln1_bias": (C,),
        "qkv_weight": (3 * C, C), "qkv_bias": (3 * C,),
        "attproj_weight": (C, C), "attproj_bias": (C,),
        "ln2_weight": (C,), "ln2_bias": (C,),
        "fc_weight": (4 * C, C), "fc_bias": (4 * C,),
        "fcproj_weight": (C, 4 * C), "fcproj_bias": (C,),
    }  # fmt: skip


class Layout:
    """Where each tensor lies: `count` parameters in `size` elements, padded at the end to a multiple of `multiple_of`.

    Tensor names: wte (Vp, C), wpe (context, C), layer.0.ln1_weight ... layer.{L-1}.fcproj_bias, lnf_weight, lnf_bias.
    """

    def __init__(self, config: GPT2Config, multiple_of: int = 1):
        self.config = config
        C = config.n_embd
        shapes = {"wte": (config.padded_vocab_size, C), "wpe": (config.context, C)}
        for layer in range(config.n_layer):
            shapes |= {f"layer.{layer}.{name}": shape for name, shape in layer_shapes(config).items()}
        shapes |= {"lnf_weight": (C,), "lnf_bias": (C,)}
        self.tensors, self.count = [], 0
        for name, shape in shapes.items():
            self.tensors.append(Tensor(name, shape, self.count))
            self.count = self.tensors[-1].stop
        self.size = -(-self.count // multiple_of) * multiple_of

    @cached_property
    def by_name(self) -> dict[str, Tensor]:
        return {tensor.name: tensor for tensor in self.tensors}

    @cached_property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """What is used together, in order: the embeddings, each layer, the final LayerNorm with the pad."""
        layers = [self.by_name[f"layer.{layer}.ln1_weight"].start for layer in range(self.config.n_layer)]
        return tuple(pairwise([0, *layers, self.by_name["lnf_weight"].start, self.size]))

    def tensors_in(self, start: int, stop: int) -> list[Tensor]:
        """The tensors that begin in [start, stop), in order."""
        low, high = (bisect_left(self.tensors, place, key=attrgetter("start")) for place in (start, stop))
        return self.tensors[low:high]

    def tensor_at(self, element: int) -> str:
        """The name of the tensor that an element of the flat buffer belongs to, or "the pad"."""
        return next((tensor.name for tensor in self.tensors if tensor.start <= element < tensor.stop), "the pad")

    def final_ranges(self) -> tuple[tuple[int, int], ...]:
        """The parts of the buffer in the order in which backward makes their gradients final.

        A layer comes in two halves. The embeddings come last: the token embedding is also the head, so its gradient has
        two parts, and the second is made at the very end.
        """
        embeddings, *layers, last = self.ranges
        halves = []
        for layer, (start, stop) in reversed(list(enumerate(layers))):
            middle = self.by_name[f"layer.{layer}.ln2_weight"].start
            halves += [(middle, stop), (start, middle)]
        return (last, *halves, embeddings)

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
    `ranges`. Not all of it need exist at once. ValueError: it has another size than the layout.
    """

    def __init__(self, layout: Layout, flat):
        if flat.shape != (layout.size,):
            raise ValueError(f"flat buffer is {flat.shape}, the layout needs ({layout.size},)")
        self.layout, self.flat = layout, flat
        self.layers = [SimpleNamespace() for _ in range(layout.config.n_layer)]
        for tensor in layout.tensors:
            *path, name = tensor.name.split(".")
            setattr(self.layers[int(path[1])] if path else self, name, self.view(tensor.name))

    def view(self, name: str):
        tensor = self.layout.by_name[name]
        return self.flat[tensor.start : tensor.stop].reshape(tensor.shape)

    @classmethod
    def zeros(cls, layout: Layout) -> "Parameters":
        return cls(layout, np.zeros(layout.size, np.float32))


def first_not_finite(values: np.ndarray) -> int | None:
    """The index of the first of some flat float32 values that is nan or infinite, None if all are numbers.

    It takes a quarter of the time of a checksum, and works piece by piece, so it needs no memory to speak of.
    """
    for start in range(0, len(values), LOOKED_AT):
        are_finite = np.isfinite(values[start : start + LOOKED_AT])
        if not are_finite.all():
            return start + int(np.argmin(are_finite))
    return None


def initialize(parameters: Parameters, seed: int, filled=no_hook) -> None:
    """GPT-2's initialization, the same on every rank for one seed: matrices N(0, 0.02), LayerNorms 1, biases 0.

    Each range of the layout is filled after the one before; filled(start, stop) follows each.
    """
    layout, random = parameters.layout, np.random.default_rng(seed)
    residual_std = INITIAL_STD / math.sqrt(2 * layout.config.n_layer)
    for start, stop in layout.ranges:
        parameters.flat[start:stop].fill(0.0)
        for tensor in layout.tensors_in(start, stop):
            view = parameters.view(tensor.name)
            if tensor.decays:
                std = residual_std if tensor.name.endswith("proj_weight") else INITIAL_STD
                random.standard_normal(out=view, dtype=np.float32)
                view *= np.float32(std)
            elif tensor.name.endswith("_weight"):
                view[:] = 1.0
            if tensor.name == "wte":
                view[layout.config.vocab_size :] = 0.0
        filled(start, stop)
