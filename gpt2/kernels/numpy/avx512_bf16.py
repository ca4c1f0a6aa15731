"""Products of bfloat16 numbers with float32 sums, using AVX-512's VDPBF16PS: pack operands, then compute `tiles`.

VDPBF16PS adds two products of bfloat16 numbers to each of 16 float32 sums. So operands are first packed as pairs along
the summed axis: rows of `a` in panels of 8, columns of `b` in panels of 48, [pair][row or column] within each (Goto and
van de Geijn 2008). A tile of 8 x 48 sums takes 24 of the 32 vector registers; 3 loaded vectors and 8 broadcast pairs
feed 24 instructions.

Operands may be bfloat16, or float32, which packing rounds to nearest even. The instructions treat numbers below 2^-126
as 0. Addresses and strides in bytes are int64, so that one compiled form serves all arrays.

Python has no such instructions, so they are generated as LLVM code (numba's @intrinsic). They are compiled only if
available(): on other CPUs LLVM would end the process.
"""

from functools import partial

from numba import types
from numba.extending import intrinsic, register_jitable

from gpt2.kernels.numpy import llvm_vectors as llvm
from gpt2.kernels.numpy.compiling import compiled, cpu_features
from gpt2.kernels.numpy.llvm_vectors import ADD, LANES, ROUND

PAIR_BYTES = 4
A_PANEL = 8
B_VECTORS = 3
B_PANEL = B_VECTORS * LANES
DEPTH = 2 * LANES  # packed operands are padded with zeros to a multiple of it
AHEAD_BYTES = 512  # how far ahead numbers are prefetched before they are packed
AHEAD_ROWS = 8
A_GROUPS = 4  # groups of 16 columns that are packed side by side
B_GROUPS = 60


def available() -> bool:
    """Return whether numba compiles for a CPU with these instructions: this CPU, unless NUMBA_CPU_* name another."""
    return {"avx512bf16", "avx512bw", "avx512vl"} <= cpu_features()


def _new_pack_rows(is_bfloat16: bool):
    """Pack up to 16 rows by 32 numbers of the summed axis, which are contiguous in a row."""

    @intrinsic
    def pack_rows(typing_context, source, row_stride, rows, depth, target, second_half, pair_stride):
        def generate(context, build, signature, arguments):
            source, row_stride, rows, depth, target, second_half, pair_stride = arguments
            whole = llvm.first_lanes(build, depth, 2 * LANES)
            halves = [llvm.first_lanes(build, build.sub(depth, llvm.I64(LANES * half)), LANES) for half in range(2)]

            def load(row):
                number = build.select(
                    build.icmp_signed("<", llvm.I64(row), rows), llvm.I64(row), build.sub(rows, llvm.I64(1))
                )
                place = build.add(source, build.mul(number, row_stride))
                for line in range(1 if is_bfloat16 else 2):
                    llvm.prefetch(build, build.add(place, llvm.I64(AHEAD_BYTES + 64 * line)))
                if is_bfloat16:
                    return llvm.load(build, llvm.MANY_HALVES, place, whole)
                low, high = (
                    llvm.load(build, llvm.FLOATS, build.add(place, llvm.I64(64 * half)), halves[half])
                    for half in range(2)
                )
                return llvm.rounded_pairs(build, low, high)

            for words in llvm.transposed(build, [build.bitcast(load(row), llvm.WORDS) for row in range(LANES)]):
                llvm.store_halves(build, words, target, second_half)
                target = build.add(target, pair_stride)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), generate

    return pack_rows


def _new_pack_columns(is_bfloat16: bool, is_whole: bool):
    """Pack 16 contiguous columns by 2 numbers of the summed axis; unless is_whole, possibly fewer of both.

    Always using masks would double the time.
    """

    @intrinsic
    def pack_columns(typing_context, source, depth_stride, columns, depth, target, second_half):
        def generate(context, build, signature, arguments):
            source, depth_stride, columns, depth, target, second_half = arguments
            kind = llvm.HALVES if is_bfloat16 else llvm.FLOATS
            rows = []
            for row, place in enumerate((source, build.add(source, depth_stride))):
                llvm.prefetch(build, build.add(place, build.mul(depth_stride, llvm.I64(AHEAD_ROWS))))
                if is_whole:
                    rows.append(llvm.load_whole(build, kind, place, 0))
                    continue
                there = build.select(build.icmp_signed("<", llvm.I64(row), depth), columns, llvm.I64(0))
                rows.append(llvm.load(build, kind, place, llvm.first_lanes(build, there, LANES)))
            interleaved = [lane for column in range(LANES) for lane in (column, column + LANES)]
            if is_bfloat16:
                pairs = llvm.shuffle(build, *rows, interleaved)
            else:
                rounded = build.bitcast(llvm.rounded_pairs(build, *rows), llvm.MANY_HALVES)
                pairs = llvm.shuffle(build, rounded, rounded, interleaved)
            llvm.store_halves(build, build.bitcast(pairs, llvm.WORDS), target, second_half)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), generate

    return pack_columns


def _new_tile(vectors: int):
    """Compute 8 rows by `vectors` * 16 columns of sums over all pairs, and store those within `rows` and `columns`."""

    @intrinsic
    def tile(typing_context, out, out_stride, rows, columns, a, b, pairs, mode):
        def generate(context, build, signature, arguments):
            out, out_stride, rows, columns, a, b, pairs, mode = arguments
            add = partial(_add_products, build)
            panels = PAIR_BYTES * A_PANEL, PAIR_BYTES * B_PANEL
            sums = llvm.sums_in_registers(build, A_PANEL, vectors, pairs, a, b, panels, add)
            masks = [llvm.first_lanes(build, build.sub(columns, llvm.I64(LANES * v)), LANES) for v in range(vectors)]

            def store(case):
                for row in range(A_PANEL):
                    is_there = build.icmp_signed("<", llvm.I64(row), rows)
                    place = build.add(out, build.mul(out_stride, llvm.I64(row)))
                    for v in range(vectors):
                        mask = build.select(is_there, masks[v], masks[v].type(None))
                        _store_sums(build, case, sums[row][v], place, v, mask)

            llvm.for_each_mode(build, mode, store)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), generate

    return tile


def _add_products(build, sums, a, b):
    """Return sums[row][vector] plus the products of the pairs at a and b."""
    vectors = len(sums[0])
    new = []
    columns = [llvm.load_whole(build, llvm.PAIRS, b, 4 * LANES * v) for v in range(vectors)]
    for row in range(A_PANEL):
        pair = llvm.spread(build, llvm.load_whole(build, llvm.I32, a, PAIR_BYTES * row), LANES)
        pair = build.bitcast(pair, llvm.PAIRS)
        new.append([
            llvm.call(build, "llvm.x86.avx512bf16.dpbf16ps.512", llvm.FLOATS, sums[row][v], pair, columns[v])
            for v in range(vectors)
        ])  # fmt: skip
    return new


def _store_sums(build, mode, sums, row, v: int, mask):
    """Store vector v of a row of a tile."""
    if mode == ROUND:
        rounded = llvm.call(build, "llvm.x86.avx512bf16.cvtneps2bf16.512", llvm.ROUNDED, sums)
        return llvm.store(build, build.bitcast(rounded, llvm.HALVES), build.add(row, llvm.I64(32 * v)), mask)
    place = build.add(row, llvm.I64(64 * v))
    llvm.store(
        build, build.fadd(sums, llvm.load(build, llvm.FLOATS, place, mask)) if mode == ADD else sums, place, mask
    )


_pack_float32_rows = _new_pack_rows(False)
_pack_bfloat16_rows = _new_pack_rows(True)
_pack_float32_columns = _new_pack_columns(False, True)
_pack_bfloat16_columns = _new_pack_columns(True, True)
_pack_float32_edge = _new_pack_columns(False, False)
_pack_bfloat16_edge = _new_pack_columns(True, False)
_tile1 = _new_tile(1)
_tile2 = _new_tile(2)
_tile3 = _new_tile(3)


def packed_depth(depth: int) -> int:
    return -(-depth // DEPTH) * DEPTH


def packed_bytes(width: int, depth: int) -> int:
    """Return the size of a packed operand of `width` rows of a, or columns of b."""
    return -(-width // B_PANEL) * B_PANEL * packed_depth(depth) * 2


@compiled
def pack(target, source, stride, depth_stride, item_bytes, width, depth, is_b):
    """Pack the operand at `source`, of item_bytes 4 (float32) or 2 (bfloat16), into packed_bytes() at `target`.

    Its `width` rows of a, or columns of b, are stride bytes apart, and numbers along the summed axis depth_stride
    bytes. One of the two strides is item_bytes.
    """
    pairs = (depth + DEPTH - 1) // DEPTH * LANES
    pair_stride = PAIR_BYTES * (B_PANEL if is_b else A_PANEL)
    second_half = 32 if is_b else pairs * pair_stride
    all_groups = (width + LANES - 1) // LANES
    side_by_side = B_GROUPS if is_b else A_GROUPS
    for first in range(0, all_groups, side_by_side):
        groups = range(first, min(first + side_by_side, all_groups))
        if depth_stride == item_bytes:
            for group in groups:
                into = target + _group_offset(group, pairs, is_b)
                rows = min(LANES, width - group * LANES)
                here = source + group * LANES * stride
                for k in range(0, depth, DEPTH):
                    place = into + k // 2 * pair_stride
                    left = min(DEPTH, depth - k)
                    if item_bytes == 2:
                        _pack_bfloat16_rows(here + 2 * k, stride, rows, left, place, second_half, pair_stride)
                    else:
                        _pack_float32_rows(here + 4 * k, stride, rows, left, place, second_half, pair_stride)
        else:
            for pair in range(pairs):
                here = source + 2 * pair * depth_stride
                left = depth - 2 * pair
                for group in groups:
                    place = target + _group_offset(group, pairs, is_b) + pair * pair_stride
                    columns = width - group * LANES
                    row = here + group * LANES * stride
                    is_edge = left < 2 or columns < LANES
                    if item_bytes == 2 and is_edge:
                        _pack_bfloat16_edge(row, depth_stride, columns, left, place, second_half)
                    elif item_bytes == 2:
                        _pack_bfloat16_columns(row, depth_stride, columns, left, place, second_half)
                    elif is_edge:
                        _pack_float32_edge(row, depth_stride, columns, left, place, second_half)
                    else:
                        _pack_float32_columns(row, depth_stride, columns, left, place, second_half)


@register_jitable
def _group_offset(group, pairs, is_b):
    """Return where a group of 16 begins, which is a third of a panel of b, or two panels of a."""
    if is_b:
        return (group // B_VECTORS * pairs * B_VECTORS + group % B_VECTORS) * LANES * PAIR_BYTES
    return group * pairs * LANES * PAIR_BYTES


@compiled
def tiles(out, out_stride, rows, columns, a, b, depth, mode):
    """Write the product of packed a and b to out (rows, columns), with out_stride bytes per row, by `mode`."""
    pairs = (depth + DEPTH - 1) // DEPTH * LANES
    item_bytes = 2 if mode == ROUND else 4
    for column in range(0, columns, B_PANEL):
        b_panel = b + column * pairs * PAIR_BYTES
        wide = columns - column
        for row in range(0, rows, A_PANEL):
            a_panel = a + row * pairs * PAIR_BYTES
            high = rows - row
            place = out + row * out_stride + column * item_bytes
            if wide > 2 * LANES:
                _tile3(place, out_stride, high, wide, a_panel, b_panel, pairs, mode)
            elif wide > LANES:
                _tile2(place, out_stride, high, wide, a_panel, b_panel, pairs, mode)
            else:
                _tile1(place, out_stride, high, wide, a_panel, b_panel, pairs, mode)


@compiled
def products(
    count, rows, columns, depth, out, out_step, out_stride, a, a_step, a_stride, a_depth_stride, a_bytes, b, b_step,
    b_stride, b_depth_stride, b_bytes, a_room, b_room, rows_at_once, columns_at_once, depth_at_once, mode,
):  # fmt: skip
    """Compute `count` products, whose operands and outputs are a step apart each; other arguments as in pack and tiles.

    a_room, b_room: buffers for packed blocks of rows_at_once and columns_at_once by depth_at_once, the whole depth for
    ROUND.

    bool(1) instead of True: for a literal, numba would compile another form of pack, which takes a second.
    """
    item_bytes = 2 if mode == ROUND else 4
    for product in range(count):
        for k in range(0, depth, depth_at_once):
            deep = min(depth_at_once, depth - k)
            into = ADD if k else mode
            for column in range(0, columns, columns_at_once):
                wide = min(columns_at_once, columns - column)
                place = b + product * b_step + column * b_stride + k * b_depth_stride
                pack(b_room, place, b_stride, b_depth_stride, b_bytes, wide, deep, bool(1))
                for row in range(0, rows, rows_at_once):
                    high = min(rows_at_once, rows - row)
                    place = a + product * a_step + row * a_stride + k * a_depth_stride
                    pack(a_room, place, a_stride, a_depth_stride, a_bytes, high, deep, bool(0))
                    place = out + product * out_step + row * out_stride + column * item_bytes
                    tiles(place, out_stride, high, wide, a_room, b_room, deep, into)
