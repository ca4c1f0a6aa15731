"""Products of bfloat16 operands with float32 sums, used instead of the products of Cores: --dtype bfloat16 on CPUs.

    (a b)_ij = sum_k bfloat16(a_ik) bfloat16(b_kj)

Parameters, gradients and everything between products stay float32. Activations that are only operands are stored as
bfloat16. If the CPU has instructions for such sums, they are used (amx_bf16.py, avx512_bf16.py). Otherwise operands are
rounded to bfloat16 and widened to float32, and BLAS computes products in float32. All add up the same products, in
different orders.
"""

import numpy as np
from ml_dtypes import bfloat16

from gpt2.kernels.numpy import amx_bf16, avx512_bf16, bf16_products, loops
from gpt2.kernels.numpy.cores import Cores
from gpt2.kernels.numpy.llvm_vectors import ADD, ROUND, WRITE


def bfloat16_cores(threads: int) -> "BFloat16Cores":
    """Return the cores with the fastest products on this CPU."""
    if amx_bf16.available():
        return TileCores(threads)
    return DotProductCores(threads) if bf16_products.available() else WideningCores(threads)


class BFloat16Cores(Cores):
    """Base class: a product is computed in blocks of rows x columns sums over `depth` numbers of k.

    Subclasses define how to prepare an operand (width, depth), how to multiply two prepared operands (sum_up), and how
    to multiply many heads (multiply_heads).
    """

    operand_dtype = np.dtype(bfloat16)
    rows: int
    columns: int
    depth: int

    def multiply(self, a, b, out, rows, columns, finish):
        """Compute a product as Cores.multiply does. Sums to be rounded stay in scratch, so k is not cut."""
        rounds = out.dtype == bfloat16
        width = out.shape[1]
        for k in _blocks(slice(0, a.shape[1]), a.shape[1] if rounds else self.depth):
            for columns_here in _blocks(columns, self.columns):
                right = self.prepared("right", b[k, columns_here].T)
                for rows_here in _blocks(rows, self.rows):
                    left = self.prepared("left", a[rows_here, k])
                    count = rows_here.stop - rows_here.start
                    result = self.scratch("result", (count, width), np.float32) if rounds else out[rows_here]
                    self.sum_up(result[:, columns_here], left, right, k, add=k.start > 0)
                    if rounds:
                        if finish is not None:
                            finish(result, rows_here, columns_here)
                        loops.keep(loops.bits(out[rows_here]), result, columns_here)
        if finish is not None and not rounds:
            finish(out[rows], rows, columns)

    def matmul(self, a, b, out, add=False):
        if add and (out.ndim == 2 or out.dtype == bfloat16):
            raise ValueError("products are only added to float32 products of heads")
        if out.ndim == 2:
            self.multiply(a, b, out, slice(0, out.shape[0]), slice(0, out.shape[1]), None)
        else:
            self.multiply_heads(a, b, out, add)

    def near(self, name, array):
        return array  # every product copies its operands anyway

    def exact(self, name, array):
        if array.dtype != bfloat16:
            return array
        wide = self.scratch(name, array.shape, np.float32)
        wide[...] = array
        return wide

    def as_operand(self, array):
        return array.astype(bfloat16).astype(array.dtype)

    def store(self, out, values):
        kept = self.scratch("kept", (1, values.size), np.uint16)
        loops.keep(kept, values.reshape(1, -1), slice(0, values.size))
        loops.bits(out)[...] = kept.reshape(values.shape)


def _blocks(whole: slice, size: int) -> list[slice]:
    return [slice(low, min(low + size, whole.stop)) for low in range(whole.start, whole.stop, size)]


class DotProductCores(BFloat16Cores):
    """Products by AVX-512's VDPBF16PS, of operands that are rounded while they are packed.

    A block of the left operand takes a quarter of an L2 cache of 1 MB. A block of the right operand takes 2 MB of the
    L3 cache, and is read once for each block of the left.
    """

    how = "AVX512_BF16, bfloat16 operands"
    kernels = avx512_bf16
    rows = 128
    columns = 1920
    depth = 1024

    def prepared(self, name, operand) -> int:
        """Pack the operand (width, depth) into scratch of that name, and return the address."""
        item = operand.itemsize
        if item not in operand.strides:
            operand = np.ascontiguousarray(operand)
        width, depth = operand.shape
        target = self._room(name, width, depth)
        pack = bf16_products.pack_b if name == "right" else bf16_products.pack_a
        pack(target, _address(operand), *operand.strides, item, width, depth)
        return target

    def _room(self, name, width, depth) -> int:
        room = self.scratch(name, (bf16_products.packed_bytes(width, depth) + 64,), np.uint8)
        return -(-_address(room) // 64) * 64

    def sum_up(self, result, left, right, k, add):
        mode = ADD if add else WRITE
        self.kernels.tiles(_address(result), result.strides[0], *result.shape, left, right, k.stop - k.start, mode)

    def multiply(self, a, b, out, rows, columns, finish):
        """Compute all blocks in one call, unless each must be finished before it is rounded."""
        if out.dtype == bfloat16 and finish is not None:
            return super().multiply(a, b, out, rows, columns, finish)
        self.multiply_heads(a[None, rows], b[None, :, columns], out[None, rows, columns], add=False)
        if finish is not None:
            finish(out[rows], rows, columns)

    def multiply_heads(self, a, b, out, add):
        heads, rows, columns = out.shape
        depth = a.shape[2]
        rounds = out.dtype == bfloat16
        deep = depth if rounds else min(depth, self.depth)
        high = min(rows, self.rows)
        wide = min(columns, self.columns)
        rooms = self._room("left", high, deep), self._room("right", wide, deep)
        operands = [(_address(operand), *operand.strides, operand.itemsize) for operand in (a, b.transpose(0, 2, 1))]
        mode = ROUND if rounds else ADD if add else WRITE
        sides = (*operands[0], *operands[1], *rooms, high, wide, deep)
        self.kernels.products(heads, rows, columns, depth, _address(out), *out.strides[:2], *sides, mode)


class TileCores(DotProductCores):
    """Products by AMX's TDPBF16PS, of the same packed operands."""

    how = "AMX, bfloat16 operands"
    kernels = amx_bf16


class WideningCores(BFloat16Cores):
    """Products by BLAS, of operands rounded to bfloat16 and widened to float32 again."""

    how = "BLAS in float32, of operands rounded to bfloat16, as this CPU has no AVX512_BF16"
    rows = 1024
    columns = 1024
    depth = 4096

    def prepared(self, name, operand) -> np.ndarray:
        """Round the operand into scratch of that name, with the same contiguous axis."""
        last = operand.ndim - 1
        is_transposed = operand.strides[last] > operand.strides[last - 1]
        order = (*range(last - 1), last, last - 1) if is_transposed else range(last + 1)
        wide = self.scratch(name, operand.transpose(order).shape, np.float32)
        wide[...] = operand.transpose(order)
        if operand.dtype != bfloat16:
            loops.round_off(wide.reshape(-1))
        return wide.transpose(order)

    def sum_up(self, result, left, right, k, add):
        Cores.matmul(self, left, right.T, result, add)

    def multiply_heads(self, a, b, out, add):
        left = self.prepared("left", a)
        right = self.prepared("right", b)
        if out.dtype == bfloat16:
            self.store(out, np.matmul(left, right, out=self.scratch("product", out.shape, np.float32)))
        else:
            Cores.matmul(self, left, right, out, add)


def _address(array) -> int:
    return array.__array_interface__["data"][0]
