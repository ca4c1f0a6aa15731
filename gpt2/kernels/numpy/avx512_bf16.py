"""Tiles of products of bfloat16 numbers by AVX-512's VDPBF16PS, which adds two products to each of 16 float32 sums.

A tile of 8 x 48 sums takes 24 of the 32 vector registers; 3 loaded vectors and 8 broadcast pairs feed 24 instructions.
"""

from numba.extending import register_jitable

from gpt2.kernels.numpy import llvm_vectors as llvm
from gpt2.kernels.numpy.bf16_products import (
    B_PAIR_BYTES,
    B_PANEL,
    LINE_BYTES,
    PAIR_BYTES,
    a_row_bytes,
    new_products,
    pairs_of,
    store_sums,
)
from gpt2.kernels.numpy.compiling import compiled
from gpt2.kernels.numpy.llvm_vectors import LANES, ROUND

TILE_ROWS = 8


def _new_tile(vectors: int):
    """Compute 8 rows by `vectors` * 16 columns of sums over all pairs, and store those within `rows` and `columns`."""

    @llvm.instructions
    def tile(build, out, out_stride, rows, columns, a, a_stride, b, pairs, mode):
        sums = _sums_in_registers(build, vectors, a, a_stride, b, pairs)
        masks = [llvm.first_lanes(build, build.sub(columns, llvm.I64(LANES * v)), LANES) for v in range(vectors)]

        def store(case):
            for row in range(TILE_ROWS):
                is_there = build.icmp_signed("<", llvm.I64(row), rows)
                place = build.add(out, build.mul(out_stride, llvm.I64(row)))
                for v in range(vectors):
                    mask = build.select(is_there, masks[v], masks[v].type(None))
                    store_sums(build, case, sums[row][v], place, v, mask)

        llvm.for_each_mode(build, mode, store)

    return tile


def _sums_in_registers(build, vectors: int, a, a_stride, b, pairs):
    """Return sums[row][vector] over all pairs of the panels at addresses a and b."""
    before = build.block
    loop = build.append_basic_block("loop")
    after = build.append_basic_block("after")
    build.branch(loop)
    build.position_at_end(loop)
    left, a_here, b_here = variables = [build.phi(llvm.I64) for _ in range(3)]
    sums = [[build.phi(llvm.FLOATS) for _ in range(vectors)] for _ in range(TILE_ROWS)]
    columns = [llvm.load_whole(build, llvm.PAIRS, b_here, LINE_BYTES * v) for v in range(vectors)]
    new = []
    for row in range(TILE_ROWS):
        place = build.add(a_here, build.mul(a_stride, llvm.I64(row)))
        pair = llvm.spread(build, llvm.load_whole(build, llvm.I32, place, 0), LANES)
        pair = build.bitcast(pair, llvm.PAIRS)
        new.append([])
        for v in range(vectors):
            operands = sums[row][v], pair, columns[v]
            total = llvm.call(build, "llvm.x86.avx512bf16.dpbf16ps.512", llvm.FLOATS, *operands)
            sums[row][v].add_incoming(llvm.FLOATS(None), before)
            sums[row][v].add_incoming(total, loop)
            new[row].append(total)
    for variable, start, step in zip(variables, (pairs, a, b), (-1, PAIR_BYTES, B_PAIR_BYTES), strict=True):
        variable.add_incoming(start, before)
        variable.add_incoming(build.add(variable, llvm.I64(step)), loop)
    build.cbranch(build.icmp_signed(">", left, llvm.I64(1)), loop, after)
    build.position_at_end(after)
    return new


_tile1 = _new_tile(1)
_tile2 = _new_tile(2)
_tile3 = _new_tile(3)


@register_jitable
def _tiles(out, out_stride, rows, columns, a, b, depth, mode):
    pairs = pairs_of(depth)
    row_bytes = a_row_bytes(depth)
    item_bytes = 2 if mode == ROUND else 4
    for column in range(0, columns, B_PANEL):
        b_panel = b + column * pairs * PAIR_BYTES
        wide = columns - column
        for row in range(0, rows, TILE_ROWS):
            a_here = a + row * row_bytes
            high = rows - row
            place = out + row * out_stride + column * item_bytes
            if wide > 2 * LANES:
                _tile3(place, out_stride, high, wide, a_here, row_bytes, b_panel, pairs, mode)
            elif wide > LANES:
                _tile2(place, out_stride, high, wide, a_here, row_bytes, b_panel, pairs, mode)
            else:
                _tile1(place, out_stride, high, wide, a_here, row_bytes, b_panel, pairs, mode)


tiles = compiled(_tiles)
products = new_products(_tiles)
