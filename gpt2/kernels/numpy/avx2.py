"""Products of numbers rounded to bfloat16 with float32 sums, using AVX2's fused multiply-add: pack, then `tiles`.

AVX2 has no instruction for bfloat16. But any product packs its operands (Goto and van de Geijn 2008). Rounding during
packing costs little, while BLAS would have to read rounded copies again. Packed numbers are float32 with bfloat16
values: rows of `a` in panels of 6, columns of `b` in panels of 16, [k][row or column] within each. A tile of 6 x 16
sums takes 12 of the 16 vector registers.

Operands may be bfloat16, or float32, which packing rounds to nearest even. Addresses and strides in bytes are int64, so
that one compiled form serves all arrays. Compiled only if available(): on other CPUs LLVM would end the process.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, register_jitable

from gpt2.kernels.numpy import llvm_vectors as llvm
from gpt2.kernels.numpy.compiling import compiled, cpu_features
from gpt2.kernels.numpy.llvm_vectors import ADD, F32, I16, I32, I64, ROUND, WRITE
from gpt2.kernels.numpy.loops import number, rounded

LANES = 8  # numbers in a vector
ITEM_BYTES = 4  # of a packed number
FLOATS = ir.VectorType(F32, LANES)
WORDS = ir.VectorType(I32, LANES)
HALVES = ir.VectorType(I16, LANES)
SIXTEEN = ir.Constant(WORDS, [16] * LANES)  # bits to shift by
A_PANEL = 6
B_VECTORS = 2
B_PANEL = B_VECTORS * LANES
DEPTH = 2  # packed operands are padded with zeros to a multiple of it
SPILL_BYTES = 32  # after a panel of a, whose last 6 numbers are also stored as a vector of 8
TILE_BYTES = A_PANEL * B_PANEL * ITEM_BYTES  # for a tile at the edge, after packed a
AHEAD = 8  # numbers of the summed axis are prefetched this far ahead of packing
SLICE = 48  # columns of b that are packed and used at once
A_GROUPS = 8  # panels that are packed side by side
B_GROUPS = 64


def available() -> bool:
    """Return whether numba compiles for a CPU with these instructions: this CPU, unless NUMBA_CPU_* name another."""
    return {"avx2", "fma"} <= cpu_features()


def _load(build, is_bfloat16: bool, address):
    """Load 8 contiguous numbers as float32 with bfloat16 values."""
    if is_bfloat16:
        words = build.shl(build.zext(llvm.load_whole(build, HALVES, address, 0), WORDS), SIXTEEN)
    else:
        words = llvm.nearest_bfloat16(build, llvm.load_whole(build, FLOATS, address, 0))
    return build.bitcast(words, FLOATS)


def _new_pack_rows(is_bfloat16: bool):
    """Pack up to 8 rows by 8 numbers of the summed axis, which are contiguous in a row.

    Also prefetches the numbers of the next panel, `ahead` bytes away.
    """

    @intrinsic
    def pack_rows(typing_context, source, row_stride, rows, ahead, target, step):
        def generate(context, build, signature, arguments):
            source, row_stride, rows, ahead, target, step = arguments
            vectors = []
            for row in range(LANES):
                is_there = build.icmp_signed("<", I64(row), rows)
                which = build.select(is_there, I64(row), build.sub(rows, I64(1)))
                place = build.add(source, build.mul(which, row_stride))
                llvm.prefetch(build, build.add(place, ahead))
                vectors.append(_load(build, is_bfloat16, place))
            for vector in llvm.transposed(build, vectors):
                llvm.store_whole(build, vector, target)
                target = build.add(target, step)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), generate

    return pack_rows


def _new_pack_columns(is_bfloat16: bool, vectors: int):
    """Pack `vectors` * 8 contiguous columns by one number of the summed axis."""

    @intrinsic
    def pack_columns(typing_context, source, depth_stride, target):
        def generate(context, build, signature, arguments):
            source, depth_stride, target = arguments
            llvm.prefetch(build, build.add(source, build.mul(depth_stride, I64(AHEAD))))
            for v in range(vectors):
                place = build.add(source, I64(LANES * v * (2 if is_bfloat16 else 4)))
                llvm.store_whole(build, _load(build, is_bfloat16, place), target, ITEM_BYTES * LANES * v)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 3), generate

    return pack_columns


@intrinsic
def _tile(typing_context, out, out_stride, a, b, depth, mode):
    """Compute 6 x 16 sums over all numbers of a panel of each operand."""

    def generate(context, build, signature, arguments):
        out, out_stride, a, b, depth, mode = arguments

        def add(sums, a, b):
            for k in range(DEPTH):
                sums = _add_products(build, sums, a, b, k)
            return sums

        for row in range(A_PANEL):  # prefetch the rows of `out`, which are far apart
            place = build.add(out, build.mul(out_stride, I64(row)))
            llvm.prefetch(build, place)
            llvm.prefetch(build, build.add(place, I64(ITEM_BYTES * B_PANEL - 1)))
        panels = ITEM_BYTES * A_PANEL, ITEM_BYTES * B_PANEL
        sums = llvm.sums_in_registers(build, FLOATS, A_PANEL, B_VECTORS, depth, DEPTH, a, b, panels, add)

        def store(case):
            for row in range(A_PANEL):
                place = build.add(out, build.mul(out_stride, I64(row)))
                for v in range(B_VECTORS):
                    _store_sums(build, case, sums[row][v], place, LANES * v)

        llvm.for_each_mode(build, mode, store)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


def _add_products(build, sums, a, b, k: int):
    """Return sums[row][vector] plus the products of the k-th numbers at a and b."""
    columns = [llvm.load_whole(build, FLOATS, b, ITEM_BYTES * (B_PANEL * k + LANES * v)) for v in range(B_VECTORS)]
    new = []
    for row in range(A_PANEL):
        factor = llvm.spread(build, llvm.load_whole(build, F32, a, ITEM_BYTES * (A_PANEL * k + row)), LANES)
        new.append([
            llvm.call(build, "llvm.fma.v8f32", FLOATS, factor, columns[v], sums[row][v]) for v in range(B_VECTORS)
        ])  # fmt: skip
    return new


def _store_sums(build, mode, sums, row, first: int):
    """Store a vector of a tile's row, from column `first` on."""
    if mode == ROUND:
        halves = build.trunc(build.lshr(llvm.nearest_bfloat16(build, sums), SIXTEEN), HALVES)
        return llvm.store_whole(build, halves, row, 2 * first)
    if mode == ADD:
        sums = build.fadd(sums, llvm.load_whole(build, FLOATS, row, 4 * first))
    llvm.store_whole(build, sums, row, 4 * first)


_pack_float32_rows = _new_pack_rows(False)
_pack_bfloat16_rows = _new_pack_rows(True)
_pack_float32_a = _new_pack_columns(False, 1)
_pack_bfloat16_a = _new_pack_columns(True, 1)
_pack_float32_b = _new_pack_columns(False, B_VECTORS)
_pack_bfloat16_b = _new_pack_columns(True, B_VECTORS)
_float = llvm.new_read(F32, types.float32)
_half = llvm.new_read(I16, types.uint16)
_put_float = llvm.new_write(types.float32)
_put_half = llvm.new_write(types.uint16)


@register_jitable
def packed_depth(depth):
    return (depth + DEPTH - 1) // DEPTH * DEPTH


@register_jitable
def _panel_bytes(depth, panel):
    return packed_depth(depth) * panel * ITEM_BYTES + (SPILL_BYTES if panel == A_PANEL else 0)


def packed_bytes(width: int, depth: int) -> int:
    """Return the size of a packed operand of `width` rows of a, or columns of b."""
    return max(-(-width // panel) * _panel_bytes(depth, panel) for panel in (A_PANEL, B_PANEL)) + TILE_BYTES


@compiled
def pack(target, source, stride, depth_stride, item_bytes, width, depth, is_b):
    """Pack the operand at `source`, of item_bytes 4 (float32) or 2 (bfloat16), into packed_bytes() at `target`.

    Its `width` rows of a, or columns of b, are stride bytes apart, and numbers along the summed axis depth_stride
    bytes. One of the two strides is item_bytes.
    """
    panel = B_PANEL if is_b else A_PANEL
    groups = B_GROUPS if is_b else A_GROUPS
    is_row = depth_stride == item_bytes
    panel_bytes = _panel_bytes(depth, panel)
    step = panel * ITEM_BYTES
    # Up to here columns can be read as vectors, of 8 columns also for a.
    by_vectors = 0 if is_row else max(0, width - max(panel, LANES) + panel) // panel * panel
    for first in range(0, width, panel * groups):
        stop = min(width, first + panel * groups)
        for k in range(depth if first < by_vectors else 0):
            for column in range(first, min(stop, by_vectors), panel):
                place = source + column * stride + k * depth_stride
                _pack_vectors(target + column // panel * panel_bytes + k * step, place, depth_stride, item_bytes, is_b)
        for column in range(max(first, by_vectors), stop, panel):
            into = target + column // panel * panel_bytes
            place = source + column * stride
            wide = min(panel, width - column)
            done = _pack_squares(into, place, stride, item_bytes, wide, depth, step) if is_row else 0
            _pack_numbers(into, place, stride, depth_stride, item_bytes, wide, done, depth, step)
        for column in range(first, stop, panel):
            into = target + column // panel * panel_bytes
            for place in range(into + depth * step, into + packed_depth(depth) * step, ITEM_BYTES):
                _put_float(place, np.float32(0.0))


@register_jitable
def _pack_vectors(target, source, depth_stride, item_bytes, is_b):
    """Pack one number of the summed axis of a whole panel."""
    if is_b and item_bytes == 2:
        _pack_bfloat16_b(source, depth_stride, target)
    elif is_b:
        _pack_float32_b(source, depth_stride, target)
    elif item_bytes == 2:
        _pack_bfloat16_a(source, depth_stride, target)
    else:
        _pack_float32_a(source, depth_stride, target)


@register_jitable
def _pack_squares(target, source, stride, item_bytes, width, depth, step):
    """Pack a panel up to the last multiple of 8 of the summed axis, and return this multiple."""
    whole = depth // LANES * LANES
    ahead = step // ITEM_BYTES * stride
    for k in range(0, whole, LANES):
        for row in range(0, width, LANES):
            place = target + k * step + row * ITEM_BYTES
            here = source + row * stride + k * item_bytes
            if item_bytes == 2:
                _pack_bfloat16_rows(here, stride, width - row, ahead, place, step)
            else:
                _pack_float32_rows(here, stride, width - row, ahead, place, step)
    return whole


@register_jitable
def _pack_numbers(target, source, stride, depth_stride, item_bytes, width, start, stop, step):
    """Pack a panel from `start` to `stop` along the summed axis, number by number."""
    for k in range(start, stop):
        for column in range(width):
            place = source + column * stride + k * depth_stride
            into = target + k * step + column * ITEM_BYTES
            _put_float(into, number(_half(place)) if item_bytes == 2 else number(rounded(_float(place))))


@compiled
def tiles(out, out_stride, rows, columns, a, b, depth, mode):
    """Write the product of packed a and b to out (rows, columns), with out_stride bytes per row, by `mode`."""
    deep = packed_depth(depth)
    item_bytes = 2 if mode == ROUND else 4
    a_bytes = _panel_bytes(depth, A_PANEL)
    b_bytes = _panel_bytes(depth, B_PANEL)
    room = a + (rows + A_PANEL - 1) // A_PANEL * a_bytes
    for column in range(0, columns, B_PANEL):
        b_panel = b + column // B_PANEL * b_bytes
        wide = columns - column
        for row in range(0, rows, A_PANEL):
            a_panel = a + row // A_PANEL * a_bytes
            high = rows - row
            place = out + row * out_stride + column * item_bytes
            if wide >= B_PANEL and high >= A_PANEL:
                _tile(place, out_stride, a_panel, b_panel, deep, mode)
            else:
                _tile(room, B_PANEL * ITEM_BYTES, a_panel, b_panel, deep, WRITE)
                _move(place, out_stride, min(high, A_PANEL), min(wide, B_PANEL), room, mode)


@register_jitable
def _move(out, out_stride, rows, columns, tile, mode):
    """Copy the sums of a tile that are within `out`, one by one."""
    for row in range(rows):
        for column in range(columns):
            total = _float(tile + (row * B_PANEL + column) * ITEM_BYTES)
            if mode == ROUND:
                _put_half(out + row * out_stride + 2 * column, rounded(total))
            else:
                place = out + row * out_stride + 4 * column
                _put_float(place, _float(place) + total if mode == ADD else total)


@compiled
def products(
    count, rows, columns, depth, out, out_step, out_stride, a, a_step, a_stride, a_depth_stride, a_bytes, b, b_step,
    b_stride, b_depth_stride, b_bytes, a_room, b_room, rows_at_once, columns_at_once, depth_at_once, mode,
):  # fmt: skip
    """Compute `count` products, whose operands and outputs are a step apart each; other arguments as in pack and tiles.

    a_room, b_room: buffers for packed blocks of rows_at_once and columns_at_once by depth_at_once, the whole depth for
    ROUND. A slice of b is multiplied with the first rows of a right after packing, while it is in the nearest cache.
    """
    item_bytes = 2 if mode == ROUND else 4
    for product in range(count):
        for k in range(0, depth, depth_at_once):
            deep = min(depth_at_once, depth - k)
            into = ADD if k else mode
            b_panel_bytes = _panel_bytes(deep, B_PANEL)
            for column in range(0, columns, columns_at_once):
                wide = min(columns_at_once, columns - column)
                for row in range(0, rows, rows_at_once):
                    high = min(rows_at_once, rows - row)
                    place = a + product * a_step + row * a_stride + k * a_depth_stride
                    pack(a_room, place, a_stride, a_depth_stride, a_bytes, high, deep, bool(0))
                    at_once = SLICE if row == 0 else wide
                    for first in range(0, wide, at_once):
                        some = min(at_once, wide - first)
                        panels = b_room + first // B_PANEL * b_panel_bytes
                        if row == 0:
                            place = b + product * b_step + (column + first) * b_stride + k * b_depth_stride
                            pack(panels, place, b_stride, b_depth_stride, b_bytes, some, deep, bool(1))
                        place = out + product * out_step + row * out_stride + (column + first) * item_bytes
                        tiles(place, out_stride, high, some, a_room, panels, deep, into)
