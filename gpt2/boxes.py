"""Read a model that was stored as one set of model shards into another set (model_shards.py).

A shard's tensor is a box of the whole model's tensor, with elements in the same order. So the intersection of two
shards' tensors is also a box. Tensors are read one after another, some rows at a time.
"""

import math
from collections.abc import Callable

import numpy as np

from gpt2.model_shards import Tensor
from gpt2.parameters import Layout

AT_ONCE = 1 << 20  # elements of a whole tensor that are assembled at once: 4 MiB

Box = tuple[tuple[int, int], ...]  # [start, stop) along each axis of a whole tensor


def read_range(layout: Layout, start: int, out: np.ndarray, stored: list[tuple[Layout, Callable]]) -> None:
    """Fill out (n,) with elements [start, start + n) of the flat buffer of `layout`; 0 beyond its last parameter.

    stored: [(layout, read), ...] of all shards of a model; read(start, out) fills `out` from a shard's flat buffer.
    """
    out.fill(0.0)
    for tensor in layout.tensors:
        low = max(start, tensor.start)
        high = min(start + len(out), tensor.stop)
        if low < high:
            sources = [(theirs.by_name[tensor.name], read) for theirs, read in stored if tensor.name in theirs.by_name]
            _read_elements(tensor, low - tensor.start, out[low - start : high - start], sources)


def intersection(one: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes, or None."""
    box = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return box if all(start < stop for start, stop in box) else None


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Return a box as slices of an outer one."""
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(box, outer, strict=True))


def box_shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def _read_elements(tensor: Tensor, start: int, out: np.ndarray, sources: list[tuple[Tensor, Callable]]) -> None:
    """Fill out (n,) with elements [start, start + n) of a tensor. sources: [(stored tensor, read), ...]."""
    for theirs, read in sources:
        if theirs.box == tensor.box:
            return read(theirs.start + start, out)
    length = math.prod(tensor.box_shape[1:])
    step = max(1, AT_ONCE // math.prod(tensor.whole_shape[1:]))
    top = tensor.box[0][0]
    stop = start + len(out)
    last = -(-stop // length)
    for row in range(start // length, last, step):
        box = ((top + row, top + min(row + step, last)), *tensor.box[1:])
        rows = _assemble(box, sources)
        first = row * length
        low = max(start, first)
        high = min(stop, first + rows.size)
        out[low - start : high - start] = rows.reshape(-1)[low - first : high - first]
    return None


def _assemble(box: Box, sources: list[tuple[Tensor, Callable]]) -> np.ndarray:
    """Return the elements of a box, in its shape, from the tensors that hold them."""
    values = np.empty(box_shape(box), np.float32)
    for theirs, read in sources:
        common = intersection(box, theirs.box)
        if common:
            # Whole rows of the stored tensor: these are contiguous there.
            rows = (common[0], *theirs.box[1:])
            found = np.empty(box_shape(rows), np.float32)
            read(theirs.start + (common[0][0] - theirs.box[0][0]) * math.prod(found.shape[1:]), found.reshape(-1))
            values[within(common, box)] = found[within(common, rows)]
    return values
