"""Measure this CPU's peak rate of multiply-add: every thread loops over that instruction, with operands in registers.

No matrix product that uses this instruction can be faster.
"""

import time
from concurrent.futures import ThreadPoolExecutor, wait

import numba
from llvmlite import ir
from numba import types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from gpt2.kernels.numpy import avx512_bf16
from gpt2.kernels.numpy import llvm_vectors as llvm

ONES = 0x3F803F80  # two bfloat16 ones, or one float32 of about 1; denormal numbers would be slow on some CPUs
ROUNDS = 500_000  # iterations of the loop in a period
PERIODS = 5  # the fastest period counts


class InstructionPeak:
    """Measures VDPBF16PS if the dtype is bfloat16 and the CPU has that instruction, else float32's FMA."""

    def __init__(self, dtype: str):
        is_wide = "+avx512f" in cpu_target.target_context.codegen().magic_tuple()[2].split(",")
        lanes = 16 if is_wide else 8
        sums = 16 if is_wide else 12  # enough to hide the latency, and few enough to fit in registers
        is_bfloat16 = dtype == "bfloat16" and avx512_bf16.available()
        self.instruction = "VDPBF16PS" if is_bfloat16 else "float32 FMA"
        self.flops_a_round = sums * lanes * (4 if is_bfloat16 else 2)
        self.run = _loop(_add_pairs if is_bfloat16 else _add_product, lanes, sums)
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
