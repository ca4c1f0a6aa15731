"""Tiles of products of bfloat16 numbers by AVX-512's VDPBF16PS, which adds two products to each of 16 float32 sums.

A tile of 8 x 48 sums takes 24 of the 32 vector registers; 3 loaded vectors and 8 broadcast pairs feed 24 instructions.
"""

from functools import partial

from numba.extending import register_jitable

from gpt2.kernels.numpy import llvm_vectors as llvm
from gpt2.kernels.numpy.bf16_products import (
    B_PAIR_BYTES,
    B_PANEL,
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
        add = partial(_add_products, build, a_stride)
        sums = llvm.sums_in_registers(build, TILE_ROWS, vectors, pairs, a, b, (PAIR_BYTES, B_PAIR_BYTES), add)
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


def _add_products(build, a_stride, sums, a, b):
    """Return sums[row][vector] plus the products of the pairs at a and b."""
    vectors = len(sums[0])
    new = []
    columns = [llvm.load_whole(build, llvm.PAIRS, b, 4 * LANES * v) for v in range(vectors)]
    for row in range(TILE_ROWS):
        place = build.add(a, build.mul(a_stride, llvm.I64(row)))
        pair = llvm.spread(build, llvm.load_whole(build, llvm.I32, place, 0), LANES)
        pair = build.bitcast(pair, llvm.PAIRS)
        new.append([
            llvm.call(build, "llvm.x86.avx512bf16.dpbf16ps.512", llvm.FLOATS, sums[row][v], pair, columns[v])
            for v in range(vectors)
        ])  # fmt: skip
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
