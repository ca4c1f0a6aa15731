"""Products of bfloat16 numbers with float32 sums on x86: pack both operands, then compute tiles of the output.

The instructions sum over pairs of numbers, so that is how operands are packed along the summed axis (Goto and van de
Geijn 2008):

    a, the left operand:    [row][pair], each row a cache line longer, so that rows do not share the sets of a cache
    b, the right operand:   [panel of 48 columns][pair][column]

Operands may be bfloat16, or float32, which packing rounds to nearest even. The instructions treat numbers below 2^-126
as 0. Addresses and strides in bytes are int64, so that one compiled form serves all arrays.

Python has no such instructions, so they are generated as LLVM code (numba's @intrinsic). They are compiled only if
available(): on other CPUs LLVM would end the process.
"""

from functools import partial

from numba.extending import register_jitable

from gpt2.kernels.numpy import llvm_vectors as llvm
from gpt2.kernels.numpy.compiling import compiled, cpu_features
from gpt2.kernels.numpy.llvm_vectors import ADD, LANES, ROUND

PAIR_BYTES = 4
LINE_BYTES = 64
B_PANEL = 3 * LANES
B_PAIR_BYTES = PAIR_BYTES * B_PANEL
DEPTH = 2 * LANES  # packed operands are padded with zeros to a multiple of it
AHEAD_BYTES = 512  # how far ahead numbers are prefetched before they are packed
AHEAD_ROWS = 8
SIDE_BY_SIDE = 60  # groups of 16 columns of b that are packed side by side


def available() -> bool:
    """Return whether numba compiles for a CPU with AVX512_BF16: this CPU, unless NUMBA_CPU_* name another."""
    return {"avx512bf16", "avx512bw", "avx512vl"} <= cpu_features()


def _words_of_line(build, is_bfloat16, place, depth):
    """Return up to 32 contiguous numbers at `place` as 16 words."""
    for line in range(1 if is_bfloat16 else 2):
        llvm.prefetch(build, build.add(place, llvm.I64(AHEAD_BYTES + LINE_BYTES * line)))
    if is_bfloat16:
        halves = llvm.load(build, llvm.MANY_HALVES, place, llvm.first_lanes(build, depth, 2 * LANES))
        return build.bitcast(halves, llvm.WORDS)
    floats = []
    for first in (0, LANES):
        there = llvm.first_lanes(build, build.sub(depth, llvm.I64(first)), LANES)
        floats.append(llvm.load(build, llvm.FLOATS, build.add(place, llvm.I64(4 * first)), there))
    return build.bitcast(llvm.rounded_pairs(build, *floats), llvm.WORDS)


def _words_of_columns(build, is_bfloat16, is_whole, place, depth_stride, columns, depth):
    """Return 2 numbers of each of 16 contiguous columns as 16 words; unless is_whole, possibly fewer of both.

    Always using masks would double the time.
    """
    kind = llvm.HALVES if is_bfloat16 else llvm.FLOATS
    rows = []
    for row, here in enumerate((place, build.add(place, depth_stride))):
        llvm.prefetch(build, build.add(here, build.mul(depth_stride, llvm.I64(AHEAD_ROWS))))
        if is_whole:
            rows.append(llvm.load_whole(build, kind, here, 0))
            continue
        there = build.select(build.icmp_signed("<", llvm.I64(row), depth), columns, llvm.I64(0))
        rows.append(llvm.load(build, kind, here, llvm.first_lanes(build, there, LANES)))
    interleaved = [lane for column in range(LANES) for lane in (column, column + LANES)]
    if is_bfloat16:
        pairs = llvm.shuffle(build, *rows, interleaved)
    else:
        rounded = build.bitcast(llvm.rounded_pairs(build, *rows), llvm.MANY_HALVES)
        pairs = llvm.shuffle(build, rounded, rounded, interleaved)
    return build.bitcast(pairs, llvm.WORDS)


def _new_pack_lines(is_b: bool):
    """Pack up to 16 rows of a, or columns of b, by 32 numbers of the summed axis, which are contiguous."""

    @llvm.instructions
    def pack_lines(build, source, stride, item_bytes, lines, depth, target, step):
        def generate(is_bfloat16):
            words = []
            for line in range(LANES):
                is_there = build.icmp_signed("<", llvm.I64(line), lines)
                number = build.select(is_there, llvm.I64(line), build.sub(lines, llvm.I64(1)))
                place = build.add(source, build.mul(number, stride))
                words.append(_words_of_line(build, is_bfloat16, place, depth))
            llvm.store_words(build, llvm.transposed(build, words) if is_b else words, target, step)

        llvm.in_both_cases(build, build.icmp_signed("==", item_bytes, llvm.I64(2)), generate)

    return pack_lines


def _new_pack_columns(is_b: bool):
    """Pack up to 16 contiguous rows of a by 32 numbers of the summed axis, or columns of b by 2 numbers."""
    all_pairs = range(1 if is_b else LANES)

    @llvm.instructions
    def pack_columns(build, source, depth_stride, item_bytes, columns, depth, target, step):
        def generate(is_bfloat16, is_whole):
            words = []
            for pair in all_pairs:
                place = build.add(source, build.mul(depth_stride, llvm.I64(2 * pair)))
                left = build.sub(depth, llvm.I64(2 * pair))
                words.append(_words_of_columns(build, is_bfloat16, is_whole, place, depth_stride, columns, left))
            llvm.store_words(build, words if is_b else llvm.transposed(build, words), target, step)

        has_columns = build.icmp_signed(">=", columns, llvm.I64(LANES))
        is_whole = build.and_(has_columns, build.icmp_signed(">=", depth, llvm.I64(2 * len(all_pairs))))

        def generate_type(is_bfloat16):
            llvm.in_both_cases(build, is_whole, partial(generate, is_bfloat16))

        llvm.in_both_cases(build, build.icmp_signed("==", item_bytes, llvm.I64(2)), generate_type)

    return pack_columns


_pack_lines_of_a = _new_pack_lines(is_b=False)
_pack_lines_of_b = _new_pack_lines(is_b=True)
_pack_columns_of_a = _new_pack_columns(is_b=False)
_pack_columns_of_b = _new_pack_columns(is_b=True)


@register_jitable
def pairs_of(depth):
    """Return the number of pairs that `depth` numbers are packed as."""
    return (depth + DEPTH - 1) // DEPTH * LANES


@register_jitable
def a_row_bytes(depth):
    return pairs_of(depth) * PAIR_BYTES + LINE_BYTES


def packed_bytes(width: int, depth: int) -> int:
    """Return the size of a packed operand of `width` rows of a, or columns of b."""
    return -(-width // B_PANEL) * B_PANEL * a_row_bytes(depth)


@compiled
def pack_a(target, source, stride, depth_stride, item_bytes, rows, depth):
    """Pack a (rows, depth), of item_bytes 4 (float32) or 2 (bfloat16), at `source` into packed_bytes() at `target`.

    Rows are stride bytes apart, and numbers along the summed axis depth_stride. One of the two is item_bytes.
    """
    row_bytes = a_row_bytes(depth)
    for first in range(0, rows, LANES):
        high = min(LANES, rows - first)
        for k in range(0, depth, DEPTH):
            here = source + first * stride + k * depth_stride
            deep = min(DEPTH, depth - k)
            place = target + first * row_bytes + 2 * k
            if depth_stride == item_bytes:
                _pack_lines_of_a(here, stride, item_bytes, high, deep, place, row_bytes)
            else:
                _pack_columns_of_a(here, depth_stride, item_bytes, high, deep, place, row_bytes)


@compiled
def pack_b(target, source, stride, depth_stride, item_bytes, columns, depth):
    """Pack b (depth, columns): arguments as in pack_a, with columns for its rows."""
    pairs = pairs_of(depth)
    for first in range(0, columns, LANES * SIDE_BY_SIDE):
        groups = range(first, min(first + LANES * SIDE_BY_SIDE, columns), LANES)
        if depth_stride == item_bytes:
            for column in groups:
                wide = min(LANES, columns - column)
                into = target + group_offset(column, pairs)
                for k in range(0, depth, DEPTH):
                    here = source + column * stride + k * item_bytes
                    place = into + k // 2 * B_PAIR_BYTES
                    _pack_lines_of_b(here, stride, item_bytes, wide, min(DEPTH, depth - k), place, B_PAIR_BYTES)
        else:
            for pair in range(pairs):
                deep = depth - 2 * pair
                for column in groups:
                    here = source + column * stride + 2 * pair * depth_stride
                    place = target + group_offset(column, pairs) + pair * B_PAIR_BYTES
                    _pack_columns_of_b(here, depth_stride, item_bytes, columns - column, deep, place, 0)


@register_jitable
def group_offset(column, pairs):
    """Return where a group of 16 columns of b begins: a third of a panel."""
    return (column // B_PANEL * pairs * B_PANEL + column % B_PANEL) * PAIR_BYTES


def store_sums(build, mode, sums, row, v: int, mask):
    """Generate the storage of vector v of a row of sums, at address `row`, by `mode`, one of llvm_vectors' modes."""
    if mode == ROUND:
        rounded = llvm.call(build, "llvm.x86.avx512bf16.cvtneps2bf16.512", llvm.ROUNDED, sums)
        return llvm.store(build, build.bitcast(rounded, llvm.HALVES), build.add(row, llvm.I64(32 * v)), mask)
    place = build.add(row, llvm.I64(LINE_BYTES * v))
    llvm.store(
        build, build.fadd(sums, llvm.load(build, llvm.FLOATS, place, mask)) if mode == ADD else sums, place, mask
    )


def new_products(tiles):
    """Return products(...) by these tiles, which write the product of packed a and b to out (rows, columns).

    tiles(out, out_stride, rows, columns, a, b, depth, mode)
    """

    @compiled
    def products(
        count, rows, columns, depth, out, out_step, out_stride, a, a_step, a_stride, a_depth_stride, a_bytes, b, b_step,
        b_stride, b_depth_stride, b_bytes, a_room, b_room, rows_at_once, columns_at_once, depth_at_once, mode,
    ):  # fmt: skip
        """Compute `count` products, whose operands and outputs are a step apart each; other arguments as in pack_a.

        a_room, b_room: buffers for packed blocks of rows_at_once and columns_at_once by depth_at_once, the whole depth
        for ROUND.
        """
        item_bytes = 2 if mode == ROUND else 4
        for product in range(count):
            for k in range(0, depth, depth_at_once):
                deep = min(depth_at_once, depth - k)
                into = ADD if k else mode
                for column in range(0, columns, columns_at_once):
                    wide = min(columns_at_once, columns - column)
                    place = b + product * b_step + column * b_stride + k * b_depth_stride
                    pack_b(b_room, place, b_stride, b_depth_stride, b_bytes, wide, deep)
                    for row in range(0, rows, rows_at_once):
                        high = min(rows_at_once, rows - row)
                        place = a + product * a_step + row * a_stride + k * a_depth_stride
                        pack_a(a_room, place, a_stride, a_depth_stride, a_bytes, high, deep)
                        place = out + product * out_step + row * out_stride + column * item_bytes
                        tiles(place, out_stride, high, wide, a_room, b_room, deep, into)

    return products
