"""Tiles of products of bfloat16 numbers by AMX's TDPBF16PS: 16 x 16 float32 sums += (16, 32) x (32, 16) products.

Four of the eight tile registers hold 32 x 32 sums, two hold 32 rows of a, two 32 columns of b. Linux grants a process
the registers on request (arch_prctl). Each thread configures them before use.

Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18.
"""

import ctypes
from functools import cache

from llvmlite import ir
from numba import types
from numba.core.cgutils import global_constant
from numba.extending import intrinsic, register_jitable

from gpt2.kernels.numpy import bf16_products
from gpt2.kernels.numpy import llvm_vectors as llvm
from gpt2.kernels.numpy.bf16_products import (
    B_PAIR_BYTES,
    DEPTH,
    LINE_BYTES,
    a_row_bytes,
    group_offset,
    new_products,
    pairs_of,
    store_sums,
)
from gpt2.kernels.numpy.compiling import compiled, cpu_features
from gpt2.kernels.numpy.llvm_vectors import LANES, ROUND

SYS_ARCH_PRCTL = 158
ARCH_REQ_XCOMP_PERM = 0x1023
TILE_DATA = 18
SIDE = 2 * LANES  # rows and columns of the sums that the registers hold
SIDE_BYTES = 4 * SIDE
# The palette with eight registers; bytes of a row of each; rows of each.
SETTINGS = [1, *[0] * 15, *[LINE_BYTES, 0] * 8, *[0] * 16, *[LANES] * 8, *[0] * 8]


@cache
def available() -> bool:
    """Return whether numba compiles for a CPU with AMX, and Linux grants this process its registers."""
    if not (bf16_products.available() and {"amx-tile", "amx-bf16"} <= cpu_features()):
        return False
    return ctypes.CDLL(None).syscall(SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0


def _call(build, name, *arguments):
    """Call an instruction. A Python int is the number of a register."""
    numbers = [ir.Constant(ir.IntType(8), one) if isinstance(one, int) else one for one in arguments]
    llvm.call(build, f"llvm.x86.{name}", ir.VoidType(), *numbers)


@llvm.instructions
def configure(build):
    """Configure the registers as tiles of 16 rows of 64 bytes."""
    settings = ir.Constant(ir.ArrayType(ir.IntType(8), len(SETTINGS)), bytearray(SETTINGS))
    address = build.ptrtoint(global_constant(build, "tile_settings", settings), llvm.I64)
    _call(build, "ldtilecfg", llvm.place_of(build, address))


@llvm.instructions
def release(build):
    _call(build, "tilerelease")


@llvm.instructions
def clear(build):
    """Set all sums to 0."""
    for number in range(4):
        _call(build, "tilezero", number)


@llvm.instructions
def load(build, a, a_below, a_stride, b, b_beside):
    """Load 32 numbers of the summed axis: of 16 rows at a and 16 at a_below, 16 columns at b and 16 at b_beside."""
    for number, place in enumerate((a, a_below)):
        _call(build, "tileloadd64", 4 + number, llvm.place_of(build, place), a_stride)
    for number, place in enumerate((b, b_beside)):
        _call(build, "tileloadd64", 6 + number, llvm.place_of(build, place), llvm.I64(B_PAIR_BYTES))


@llvm.instructions
def multiply(build):
    """Add the products of the loaded rows and columns to the sums."""
    for number in range(4):
        row, column = divmod(number, 2)
        _call(build, "tdpbf16ps", number, 4 + row, 6 + column)


@intrinsic
def stored(typing_context):
    """Store the sums (32, 32), float32, on the stack, and return their address."""

    def generate(context, build, signature, arguments):
        with build.goto_entry_block():
            room = build.alloca(ir.ArrayType(llvm.F32, SIDE * SIDE))
            room.align = LINE_BYTES
        address = build.ptrtoint(room, llvm.I64)
        for number in range(4):
            row, column = divmod(number, 2)
            place = llvm.place_of(build, address, row * LANES * SIDE_BYTES + column * LINE_BYTES)
            _call(build, "tilestored64", number, place, llvm.I64(SIDE_BYTES))
        return address

    return types.int64(), generate


@llvm.instructions
def _move_row(build, source, target, columns, mode):
    """Store the first `columns`, at most 32, of the float32 sums at source to target, by `mode`."""
    sums = [llvm.load_whole(build, llvm.FLOATS, source, LINE_BYTES * v) for v in range(2)]
    masks = [llvm.first_lanes(build, build.sub(columns, llvm.I64(LANES * v)), LANES) for v in range(2)]

    def store(case):
        for v in range(2):
            store_sums(build, case, sums[v], target, v, masks[v])

    llvm.for_each_mode(build, mode, store)


@register_jitable
def _tiles(out, out_stride, rows, columns, a, b, depth, mode):
    pairs = pairs_of(depth)
    a_stride = a_row_bytes(depth)
    item_bytes = 2 if mode == ROUND else 4
    configure()
    for column in range(0, columns, SIDE):
        wide = min(columns - column, SIDE)
        b_here = b + group_offset(column, pairs)
        b_beside = b + group_offset(column + LANES, pairs) if wide > LANES else b_here
        for row in range(0, rows, SIDE):
            high = min(rows - row, SIDE)
            a_here = a + row * a_stride
            a_below = a_here + LANES * a_stride if high > LANES else a_here
            clear()
            for k in range(0, 2 * pairs, DEPTH):
                b_bytes = k // 2 * B_PAIR_BYTES
                load(a_here + 2 * k, a_below + 2 * k, a_stride, b_here + b_bytes, b_beside + b_bytes)
                multiply()
            sums = stored()
            place = out + row * out_stride + column * item_bytes
            for n in range(high):
                _move_row(sums + n * SIDE_BYTES, place + n * out_stride, wide, mode)
    release()


tiles = compiled(_tiles)
products = new_products(_tiles)
