"""Which piece of a model a rank holds where several ranks share one: the layers of a stage, and of each tensor a part.

Attention is cut by heads, the feed-forward block by columns, the vocabulary by rows (Shoeybi et al. 2019). Where the
number does not divide, parts differ by one. What is not cut belongs to part 0, and the token embedding, which is also
the head, to the first stage. So each parameter is held by exactly one rank of those that share a model: norms,
checkpoints and optimizer state need no special cases. What a rank uses and another holds is borrowed:

    LayerNorms, biases of attproj, fcproj   by all parts but part 0
    token embedding (its part of the rows)  by the last stage, from the first
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from gpt2.config import GPT2Config


@dataclass(frozen=True)
class Piece:
    """Layers [first_layer, stop_layer), and part number `part` of `parts` of each.

    is_first: of the stage that has the embeddings. is_last: of the stage that has the head.
    """

    first_layer: int
    stop_layer: int
    is_first: bool = True
    is_last: bool = True
    part: int = 0
    parts: int = 1

    @property
    def is_whole(self) -> bool:
        return self.is_first and self.is_last and self.parts == 1

    def share(self, count: int) -> tuple[int, int]:
        """[start, stop) of this part, of so many heads, columns or rows."""
        return count * self.part // self.parts, count * (self.part + 1) // self.parts

    def share_size(self, count: int) -> int:
        start, stop = self.share(count)
        return stop - start


class Alone:
    """What a rank that has all of every tensor does with the ranks that have other parts of them: nothing.

    dist/parts.py has the same methods for several parts.
    """

    def room(self, shape: tuple[int, ...]):
        """Memory for partial sums that need no copy then, or None."""
        return None

    def sum(self, rows):
        """Partial sums (N, C) or (N,) become the sums over all parts. Returns where they lie until the next call."""
        return rows

    def maximum(self, rows):
        """The same for the largest numbers (N,), which take the place of the rows."""
        return rows


ALONE = Alone()


def whole(config: GPT2Config) -> Piece:
    """All of a model."""
    return Piece(0, config.n_layer)


def pieces(layers: tuple[int, ...], parts: int) -> list[Piece]:
    """All pieces of a model, stage by stage and then part by part. layers: how many each stage has."""
    found, first = [], 0
    for stage, count in enumerate(layers):
        ends = stage == 0, stage == len(layers) - 1
        found += [Piece(first, first + count, *ends, part, parts) for part in range(parts)]
        first += count
    return found


@dataclass(frozen=True)
class Tensor:
    """A named tensor's place in a flat buffer, and in the whole model's tensor of that name.

    shape: as the kernels see it. box: [start, stop) along each axis of whole_shape, whose elements lie in the buffer in
    that order. The two differ in qkv alone, whose whole shape tells queries, keys and values apart.
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
        """Weight decay is for matrices and embeddings, not for biases and LayerNorms."""
        return len(self.shape) > 1

    @property
    def is_whole(self) -> bool:
        return self.box == whole_box(self.whole_shape)

    @property
    def is_rows(self) -> bool:
        """Whether the box is whole rows of the tensor, one after another there, too."""
        return self.box[1:] == whole_box(self.whole_shape)[1:]

    @property
    def box_shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.box)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Those of the whole tensor that the box is."""
        return tuple(slice(*bounds) for bounds in self.box)


def whole_box(shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple((0, length) for length in shape)


def tensors(config: GPT2Config, piece: Piece) -> tuple[list[Tensor], list[Tensor]]:
    """(held, borrowed): the tensors of a piece, one after another in a flat buffer each."""
    held, borrowed = [], []
    for name, whole_shape, cut_axis, is_lent in _uses(config, piece):
        if not is_lent and (cut_axis is not None or piece.part == 0):
            held.append(_placed(held, config, piece, name, whole_shape, cut_axis))
        elif is_lent or name != "wpe":
            borrowed.append(_placed(borrowed, config, piece, name, whole_shape, cut_axis))
    return held, borrowed


def _uses(config: GPT2Config, piece: Piece) -> Iterator[tuple[str, tuple[int, ...], int | None, bool]]:
    """(name, whole shape, axis that is cut or None, whether another stage holds it) of all that a piece computes with,
    in the order in which forward comes to it."""
    C, rows = config.n_embd, config.padded_vocab_size
    if piece.is_last and not piece.is_first:
        yield "wte", (rows, C), 0, True
    if piece.is_first:
        yield "wte", (rows, C), 0, False
        yield "wpe", (config.context, C), None, False
    for layer in range(piece.first_layer, piece.stop_layer):
        for name, (whole_shape, cut_axis) in layer_tensors(config).items():
            yield f"layer.{layer}.{name}", whole_shape, cut_axis, False
    if piece.is_last:
        yield "lnf_weight", (C,), None, False
        yield "lnf_bias", (C,), None, False


def layer_tensors(config: GPT2Config) -> dict[str, tuple[tuple[int, ...], int | None]]:
    """{name: (whole shape, axis that parts cut)} of one transformer block's tensors, in the order forward uses them.

    A weight is (outputs, inputs) as in llm.c; in qkv, three of them follow one another.
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
    """The shapes of a transformer block's tensors as the kernels see them, in the same order."""
    return {name: as_kernels_see(name, whole_shape) for name, (whole_shape, _) in layer_tensors(config).items()}


def _placed(before: list[Tensor], config: GPT2Config, piece: Piece, name, whole_shape, cut_axis) -> Tensor:
    """The tensor behind those before it."""
    box = list(whole_box(whole_shape))
    if cut_axis is not None:
        # Attention's channels are cut between heads, wherever they are; rows of wte and columns of fc anywhere.
        unit = config.head_size if "qkv" in name or "attproj" in name else 1
        box[cut_axis] = tuple(unit * bound for bound in piece.share(whole_shape[cut_axis] // unit))
    shape = as_kernels_see(name, tuple(stop - start for start, stop in box))
    return Tensor(name, shape, before[-1].stop if before else 0, whole_shape, tuple(box))


def as_kernels_see(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a tensor, or of a box of it, with queries, keys and values as rows of one matrix."""
    return (shape[0] * shape[1], *shape[2:]) if "qkv" in name else shape
