"""Matrix products on the device by cuBLASLt: row-major arrays, fused epilogues, algorithms chosen by timing,
or given by a process that has timed them before.

cuBLASLt is column-major, where a row-major matrix is its own transpose: so out = left @ right is asked for as
out^T = right^T left^T, with A = right and B = left. A transposed view (`weight.T`) costs nothing.
"""

import ctypes
import math
from dataclasses import dataclass
from functools import cached_property

from gpt2.kernels.cupy import cublaslt
from gpt2.kernels.cupy.cublaslt import CublasError, CublasLt, Described, HeuristicResult, algorithm_of
from gpt2.kernels.cupy.launch import storage

CANDIDATES = 8  # algorithms that are timed for each shape
LARGEST_ALIGNMENT = 256


class NoAlgorithm(RuntimeError):
    """cuBLASLt has none for a product, or for its epilogue."""


@dataclass(frozen=True)
class Operand:
    """A matrix in memory as cuBLASLt sees it: column-major (rows, columns), and whether it has to be transposed."""

    rows: int
    columns: int
    leading: int
    transposed: bool = False


@dataclass(frozen=True)
class Recipe:
    """One product and its epilogue, all that the choice of an algorithm depends on. D (m, n) = op(A) op(B)."""

    a: Operand
    b: Operand
    d: Operand
    storage: str
    epilogue: str
    alignments: tuple[int, ...]  # in bytes, of A, B, C and D


def name_of(recipe: Recipe, tf32: bool) -> str:
    """A recipe as one word, for files: "1024x768/1024,768x64/768T,... bfloat16 bias 256,256,256,256"."""
    operands = ",".join(
        f"{one.rows}x{one.columns}/{one.leading}{'T' * one.transposed}" for one in (recipe.a, recipe.b, recipe.d)
    )
    storage = "tf32" if tf32 and recipe.storage == "float32" else recipe.storage
    return f"{operands} {storage} {recipe.epilogue} {','.join(map(str, recipe.alignments))}"


def make_recipe(out, left, right, epilogue: str) -> Recipe:
    """out (M, N) = left (M, K) @ right (K, N), each row-major or a transposed view of that; out row-major."""
    if left.shape[1] != right.shape[0] or out.shape != (left.shape[0], right.shape[1]):
        raise ValueError(f"{left.shape} @ {right.shape} does not make {out.shape}")
    alignments = tuple(_alignment(address(array)) for array in (right, left, out, out))
    return Recipe(_operand(right), _operand(left), _operand(out), storage(out), epilogue, alignments)


def address(array) -> int:
    """Where a device array begins: 0 for None."""
    return 0 if array is None else array.data.ptr


class Plan:
    """A recipe's descriptors, and the algorithm once it is chosen."""

    def __init__(self, library: CublasLt, recipe: Recipe, tf32: bool, workspace_bytes: int):
        data_type = cublaslt.DATA_TYPES[recipe.storage]
        tf32 = tf32 and recipe.storage == "float32"
        compute = cublaslt.COMPUTE_TF32 if tf32 else cublaslt.COMPUTE_FLOAT32
        self.recipe, self._library, self.algorithm, self.times_ms = recipe, library, None, []
        self.descriptor = Described(library, "MatmulDesc", compute, cublaslt.DATA_TYPES["float32"])
        self.descriptor.set(cublaslt.TRANSPOSE_A, recipe.a.transposed, ctypes.c_int32)
        self.descriptor.set(cublaslt.TRANSPOSE_B, recipe.b.transposed, ctypes.c_int32)
        self.descriptor.set(cublaslt.EPILOGUE, cublaslt.EPILOGUES[recipe.epilogue], ctypes.c_uint32)
        if "gelu" in recipe.epilogue:
            self.descriptor.set(cublaslt.AUX_LEADING, recipe.d.leading, ctypes.c_int64)
        self.a, self.b, self.d = (
            library.layout(data_type, operand.rows, operand.columns, operand.leading)
            for operand in (recipe.a, recipe.b, recipe.d)
        )
        self.preference = Described(library, "MatmulPreference")
        self.preference.set(cublaslt.WORKSPACE_BYTES, workspace_bytes, ctypes.c_uint64)
        self.preference.set(cublaslt.REDUCTION_SCHEMES, cublaslt.REDUCE_IN_FLOAT32, ctypes.c_uint32)
        for attribute, alignment in zip(cublaslt.ALIGNMENTS_ABCD, recipe.alignments, strict=True):
            self.preference.set(attribute, alignment, ctypes.c_uint32)

    def set_pointers(self, bias: int, aux: int) -> None:
        """Of the epilogue: `bias` is what is added, or where its gradient goes; `aux` is GELU's input."""
        if bias:
            self.descriptor.set(cublaslt.BIAS_POINTER, bias, ctypes.c_uint64)
        if aux:
            self.descriptor.set(cublaslt.AUX_POINTER, aux, ctypes.c_uint64)

    def candidates(self, handle) -> list[HeuristicResult]:
        """What cuBLASLt takes for the fastest, best first; none where it has no such epilogue."""
        results, found = (HeuristicResult * CANDIDATES)(), ctypes.c_int()
        layouts = (layout.pointer for layout in (self.a, self.b, self.d, self.d))
        try:
            self._library.cublasLtMatmulAlgoGetHeuristic(
                handle, self.descriptor.pointer, *layouts, self.preference.pointer, CANDIDATES, results,
                ctypes.byref(found),
            )  # fmt: skip
        except CublasError as error:
            if error.status != cublaslt.NOT_SUPPORTED:
                raise
            return []
        return [result for result in results[: found.value] if result.state == 0]


class Matmul:
    """device.matmul. time_ms(run) is how long run() takes on the stream; workspace an array of bytes of its own."""

    def __init__(self, library: CublasLt, stream_pointer: int, workspace, scratch, time_ms, tf32: bool):
        self._library, self._stream, self._workspace = library, stream_pointer, workspace
        self._scratch, self._time_ms, self._tf32 = scratch, time_ms, tf32
        self._zero, self._one = ctypes.c_float(0.0), ctypes.c_float(1.0)
        self.plans: dict[Recipe, Plan] = {}
        self._given: dict[str, bytes] = {}

    def algorithms(self) -> dict[str, bytes]:
        """What is chosen or given by now: an algorithm's 64 bytes by name_of."""
        return self._given | {
            name_of(plan.recipe, self._tf32): bytes(plan.algorithm.algorithm)
            for plan in self.plans.values()
            if plan.algorithm is not None
        }

    def give(self, algorithms: dict[str, bytes]) -> None:
        """Take these from now on, in place of what is chosen by now and of what would be timed."""
        chosen = self.algorithms()
        self._given |= algorithms
        for plan in self.plans.values():
            name = name_of(plan.recipe, self._tf32)
            if name in algorithms and algorithms[name] != chosen.get(name):
                plan.algorithm = None

    @cached_property
    def _handle(self):
        return self._library.new_handle()

    def __call__(
        self, out, left, right, *, bias=None, gelu_input=None, dgelu_input=None, left_sums=None, accumulate=False
    ) -> None:
        """out (M, N) = or += left (M, K) @ right (K, N), and at most one of these epilogues.

        bias (N,): is added. bias and gelu_input (M, N): gelu_input = product + bias, out = gelu(gelu_input).
        dgelu_input (M, N): out = product * gelu'(dgelu_input). left_sums (M,) = left's row sums, a bias's gradient.
        NoAlgorithm where cuBLASLt has none for it.
        """
        recipe = make_recipe(out, left, right, _epilogue(bias, gelu_input, dgelu_input, left_sums))
        plan = self.plans.get(recipe) or self._new_plan(recipe)
        plan.set_pointers(
            address(left_sums if bias is None else bias), address(dgelu_input if gelu_input is None else gelu_input)
        )
        if plan.algorithm is None:
            self._choose(plan, out, left, right, accumulate)
        self._run(plan, plan.algorithm, out, left, right, accumulate)

    def _new_plan(self, recipe):
        plan = self.plans[recipe] = Plan(self._library, recipe, self._tf32, self._workspace.nbytes)
        return plan

    def _choose(self, plan, out, left, right, accumulate):
        """Take the given algorithm; else time the candidates on these very operands. Either tries it on another output
        where it would be added to."""
        if accumulate:
            out = self._scratch("matmul", out.shape, out.dtype)
        if self._take_given(plan, out, left, right, accumulate):
            return
        best_ms = math.inf
        for candidate in plan.candidates(self._handle):
            try:
                ms = self._time_ms(lambda: self._run(plan, candidate, out, left, right, accumulate))  # noqa: B023
            except CublasError:  # proposed, and refused after all
                ms = math.inf
            plan.times_ms.append(ms)
            if ms < best_ms:
                best_ms, plan.algorithm = ms, candidate
        if plan.algorithm is None:
            raise NoAlgorithm(f"cuBLASLt has no algorithm for {plan.recipe}")

    def _take_given(self, plan, out, left, right, accumulate) -> bool:
        name = name_of(plan.recipe, self._tf32)
        if name not in self._given:
            return False
        algorithm = algorithm_of(self._given[name])
        try:
            self._run(plan, algorithm, out, left, right, accumulate)
        except CublasError:
            return False
        plan.algorithm = algorithm
        return True

    def _run(self, plan, algorithm, out, left, right, accumulate):
        beta = self._one if accumulate else self._zero
        self._library.cublasLtMatmul(
            self._handle, plan.descriptor.pointer, ctypes.addressof(self._one),
            address(right), plan.a.pointer, address(left), plan.b.pointer, ctypes.addressof(beta),
            address(out), plan.d.pointer, address(out), plan.d.pointer, ctypes.addressof(algorithm.algorithm),
            address(self._workspace), self._workspace.nbytes, self._stream,
        )  # fmt: skip


def _epilogue(bias, gelu_input, dgelu_input, left_sums) -> str:
    if gelu_input is not None:
        return "gelu_aux_bias"
    if dgelu_input is not None:
        return "dgelu"
    if left_sums is not None:
        return "bgradb"
    return "none" if bias is None else "bias"


def _operand(matrix) -> Operand:
    """A row-major (rows, columns) matrix is column-major (columns, rows); a transposed view has to be turned back."""
    (rows, columns), (row_bytes, column_bytes) = matrix.shape, matrix.strides
    if column_bytes == matrix.itemsize:
        return Operand(columns, rows, row_bytes // matrix.itemsize)
    if row_bytes == matrix.itemsize:
        return Operand(rows, columns, column_bytes // matrix.itemsize, transposed=True)
    raise ValueError(f"a matrix with strides {matrix.strides}, expected neighbours in rows or columns")


def _alignment(pointer: int) -> int:
    """The largest power of two that divides the address, as far as anyone asks."""
    return min(pointer & -pointer, LARGEST_ALIGNMENT) if pointer else LARGEST_ALIGNMENT
