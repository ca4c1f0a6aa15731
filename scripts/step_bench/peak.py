"""Measure this CPU's peak rate of multiply-add: every thread loops over that instruction, with operands in registers.

No matrix product that uses this instruction can be faster.
"""

import time
from concurrent.futures import ThreadPoolExecutor, wait

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from gpt2.kernels.numpy import amx_bf16, bf16_products
from gpt2.kernels.numpy import llvm_vectors as llvm
from gpt2.kernels.numpy.compiling import cpu_features

ONES = 0x3F803F80  # two bfloat16 ones, or one float32 of about 1; denormal numbers would be slow on some CPUs
ROUNDS = 500_000  # iterations of the loop in a period
PERIODS = 5  # the fastest period counts


class InstructionPeak:
    """Measures the instruction that multiplies this dtype: TDPBF16PS or VDPBF16PS if the CPU has it, or float32's FMA.

    run(rounds, word): returns a sum that `rounds` iterations have added to; all numbers are the bits of `word`.
    """

    def __init__(self, dtype: str):
        is_wide = "avx512f" in cpu_features()
        lanes = 16 if is_wide else 8
        sums = 16 if is_wide else 12  # enough to hide the latency, and few enough to fit in registers
        if dtype == "bfloat16" and amx_bf16.available():
            self.instruction = "TDPBF16PS"
            self.flops_a_round = 2 * amx_bf16.SIDE**2 * bf16_products.DEPTH
            self.run = _tiles
        elif dtype == "bfloat16" and bf16_products.available():
            self.instruction = "VDPBF16PS"
            self.flops_a_round = sums * lanes * 4
            self.run = _loop(_add_pairs, lanes, sums)
        else:
            self.instruction = "float32 FMA"
            self.flops_a_round = sums * lanes * 2
            self.run = _loop(_add_product, lanes, sums)
        self.run(1, ONES)

    def flops(self, threads: int) -> float:
        """Return the operations per second of all threads together."""
        seconds = []
        with ThreadPoolExecutor(threads) as pool:
            for _ in range(PERIODS):
                start = time.perf_counter()
                wait([pool.submit(self.run, ROUNDS, ONES) for _ in range(threads)])
                seconds.append(time.perf_counter() - start)
        return threads * ROUNDS * self.flops_a_round / min(seconds)


def _add_product(build, total, word):
    """Return total + x y, fused if the CPU supports it."""
    factor = build.bitcast(llvm.spread(build, word, total.type.count), total.type)
    return llvm.call(build, f"llvm.fmuladd.v{total.type.count}f32", total.type, factor, factor, total)


def _add_pairs(build, total, word):
    pair = build.bitcast(llvm.spread(build, word, llvm.LANES), llvm.PAIRS)
    return llvm.call(build, "llvm.x86.avx512bf16.dpbf16ps.512", total.type, total, pair, pair)


def _tiles(rounds: int, word: int) -> float:
    operand = np.full(bf16_products.B_PAIR_BYTES * 16 // 4, word, np.int32)
    return _tile_rounds(rounds, operand.ctypes.data)


@numba.njit(nogil=True)
def _tile_rounds(rounds, operand):
    amx_bf16.configure()
    amx_bf16.clear()
    amx_bf16.load(operand, operand, bf16_products.LINE_BYTES, operand, operand)
    for _ in range(rounds):
        amx_bf16.multiply()
    total = _number_at(amx_bf16.stored())
    amx_bf16.release()
    return total


@intrinsic
def _number_at(typing_context, address):
    def generate(context, build, signature, arguments):
        return llvm.load_whole(build, llvm.F32, arguments[0], 0)

    return types.float32(types.int64), generate


def _loop(add, lanes: int, sums: int):
    """Return run(rounds, word), which calls add(build, sum, word) for each sum in each round.

    word: the bits of an int32, an argument because the compiler could fold a constant.
    """
    vector = ir.VectorType(llvm.F32, lanes)
    zero = vector(None)

    @intrinsic
    def add_up(typing_context, rounds, word):
        def generate(context, build, signature, arguments):
            rounds, word = arguments
            before = build.block
            loop = build.append_basic_block("loop")
            after = build.append_basic_block("after")
            build.branch(loop)
            build.position_at_end(loop)
            left = build.phi(llvm.I64)
            totals = [build.phi(vector) for _ in range(sums)]
            new = [add(build, total, word) for total in totals]
            fewer = build.sub(left, llvm.I64(1))
            for variable, start, value in zip([left, *totals], [rounds, *[zero] * sums], [fewer, *new], strict=True):
                variable.add_incoming(start, before)
                variable.add_incoming(value, loop)
            build.cbranch(build.icmp_signed(">", fewer, llvm.I64(0)), loop, after)
            build.position_at_end(after)
            for value in new[1:]:
                new[0] = build.fadd(new[0], value)  # every sum is used, so none is optimized away
            return build.extract_element(new[0], llvm.I32(0))

        return types.float32(types.int64, types.int32), generate

    return numba.njit("float32(int64, int32)", nogil=True)(lambda rounds, word: add_up(rounds, word))
