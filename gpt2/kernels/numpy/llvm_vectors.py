"""LLVM's vector instructions, which numba does not offer (bf16_products.py, avx512_bf16.py, amx_bf16.py).

The first argument is llvmlite's builder. An address is an int64 without alignment. A word is a pair of bfloat16.
"""

import inspect

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LANES = 16  # float32 numbers or words in a vector
# Modes: write a tile's sums as float32, add them, or write them as bfloat16.
WRITE = 0
ADD = 1
ROUND = 2


class _BFloat(ir.types.Type):
    """LLVM's bfloat type, which llvmlite lacks."""

    def _to_string(self):
        return "bfloat"

    def __eq__(self, other):
        return isinstance(other, _BFloat)

    def __hash__(self):
        return hash(_BFloat)


I16 = ir.IntType(16)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
F32 = ir.FloatType()
FLOATS = ir.VectorType(F32, LANES)
WORDS = ir.VectorType(I32, LANES)
HALVES = ir.VectorType(I16, LANES)
MANY_HALVES = ir.VectorType(I16, 2 * LANES)
PAIRS = ir.VectorType(_BFloat(), 2 * LANES)
ROUNDED = ir.VectorType(_BFloat(), LANES)
NAMES = {FLOATS: "v16f32", HALVES: "v16i16", MANY_HALVES: "v32i16"}


def instructions(generate):
    """Make generate(build, *values) a function that compiled code can call with as many int64. It returns nothing."""
    typing_context, *values = inspect.signature(generate).parameters.values()

    def typed(typing_context, *arguments):
        def generate_all(context, build, signature, arguments):
            generate(build, *arguments)
            return context.get_dummy_value()

        return types.void(*[types.int64] * len(values)), generate_all

    typed.__signature__ = inspect.Signature([typing_context, *values])
    return intrinsic(typed)


def in_both_cases(build, condition, generate) -> None:
    """Generate a branch: generate(True) if the condition holds, else generate(False)."""
    with build.if_else(condition) as (then, otherwise):
        with then:
            generate(True)
        with otherwise:
            generate(False)


def call(build, name, result, *arguments):
    """Call an LLVM intrinsic function."""
    kinds = [argument.type for argument in arguments]
    return build.call(build.module.declare_intrinsic(name, (), ir.FunctionType(result, kinds)), arguments)


def place_of(build, address, offset: int = 0):
    return build.inttoptr(build.add(address, I64(offset)), ir.PointerType())


def load(build, kind, address, mask):
    """Load a vector. Lanes outside the mask are 0, and their memory is not accessed."""
    return call(build, f"llvm.masked.load.{NAMES[kind]}.p0", kind, place_of(build, address), I32(1), mask, kind(None))


def store(build, value, address, mask):
    arguments = value, place_of(build, address), I32(1), mask
    call(build, f"llvm.masked.store.{NAMES[value.type]}.p0", ir.VoidType(), *arguments)


def load_whole(build, kind, address, offset):
    """Load a whole vector."""
    return build.load(place_of(build, address, offset), align=1, typ=kind)


def prefetch(build, address):
    """Prefetch the cache line at `address`, which may be invalid."""
    call(build, "llvm.prefetch.p0", ir.VoidType(), place_of(build, address), *(I32(n) for n in (0, 3, 1)))


def spread(build, value, lanes: int):
    """Return a vector with the value in all lanes."""
    kind = ir.VectorType(value.type, lanes)
    first = build.insert_element(kind(ir.Undefined), value, I32(0))
    return shuffle(build, first, first, [0] * lanes)


def shuffle(build, x, y, lanes: list[int]):
    return build.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def first_lanes(build, count, lanes: int):
    """Return the mask of the first `count` lanes."""
    numbers = ir.Constant(ir.VectorType(I64, lanes), list(range(lanes)))
    return build.icmp_signed("<", numbers, spread(build, count, lanes))


def rounded_pairs(build, low, high):
    """Round 16 float32 in `low` and 16 in `high` to 32 bfloat16, in this order."""
    return call(build, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", PAIRS, high, low)


def store_words(build, vectors, target, step):
    """Store vectors of 16 words, `step` bytes apart."""
    for words in vectors:
        build.store(words, place_of(build, target)).align = 1
        target = build.add(target, step)


def transposed(build, rows):
    """Transpose n vectors of n in log2(n) steps. Each moves the numbers by one power of two."""
    lanes = len(rows)
    step = 1
    while step < lanes:
        low = [lane + (lanes - step if lane & step else 0) for lane in range(lanes)]
        high = [lane + (lanes if lane & step else step) for lane in range(lanes)]
        new = list(rows)
        for row in (row for row in range(lanes) if not row & step):
            new[row] = shuffle(build, rows[row], rows[row + step], low)
            new[row + step] = shuffle(build, rows[row], rows[row + step], high)
        rows = new
        step *= 2
    return rows


def for_each_mode(build, mode, store):
    """Generate a switch over `mode` that calls store(case) for WRITE, ADD and ROUND."""
    end = build.append_basic_block("end")
    choice = build.switch(mode, end)
    for case in (WRITE, ADD, ROUND):
        block = build.append_basic_block("store")
        choice.add_case(I64(case), block)
        build.position_at_end(block)
        store(case)
        build.branch(end)
    build.position_at_end(end)
