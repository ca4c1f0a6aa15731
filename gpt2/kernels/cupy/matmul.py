"""Matrix products with cuBLASLt: row-major arrays, fused epilogues, and algorithms that are chosen by timing or given.

cuBLASLt is column-major: it sees a row-major matrix as the transpose. So out = left @ right is computed as
out^T = right^T left^T, with A = right and B = left. A transposed view (`weight.T`) costs nothing.
"""

import ctypes
import math
from dataclasses import dataclass
from functools import cached_property

from gpt2.kernels.cupy import cublaslt
from gpt2.kernels.cupy.cublaslt import CublasError, CublasLt, Described, HeuristicResult
from gpt2.kernels.cupy.launch import storage

CANDIDATES = 8  # algorithms that are timed for each shape
LARGEST_ALIGNMENT = 256


class NoAlgorithm(RuntimeError):
    """cuBLASLt has no algorithm for a product, or for its epilogue."""


@dataclass(frozen=True)
class Operand:
    """A matrix as cuBLASLt sees it: column-major (rows, columns), and whether to transpose it."""

    rows: int
    columns: int
    leading: int
    transposed: bool = False


@dataclass(frozen=True)
class Recipe:
    """A product and its epilogue: all that the choice of an algorithm depends on. D (m, n) = op(A) op(B)."""

    a: Operand
    b: Operand
    d: Operand
    storage: str
    epilogue: str
    alignments: tuple[int, ...]  # in bytes, of A, B, C and D


def name_of(recipe: Recipe, tf32: bool) -> str:
    """Return a recipe's name, for files: "1024x768/1024,768x64/768T,... bfloat16 bias 256,256,256,256"."""
    operands = ",".join(
        f"{one.rows}x{one.columns}/{one.leading}{'T' * one.transposed}" for one in (recipe.a, recipe.b, recipe.d)
    )
    storage = "tf32" if tf32 and recipe.storage == "float32" else recipe.storage
    return f"{operands} {storage} {recipe.epilogue} {','.join(map(str, recipe.alignments))}"


def make_recipe(out, left, right, epilogue: str) -> Recipe:
    """Describe out (M, N) = left (M, K) @ right (K, N): left and right row-major or transposed views, out row-major."""
    if left.shape[1] != right.shape[0] or out.shape != (left.shape[0], right.shape[1]):
        raise ValueError(f"{left.shape} @ {right.shape} does not make {out.shape}")
    alignments = tuple(_alignment(address(array)) for array in (right, left, out, out))
    return Recipe(_operand(right), _operand(left), _operand(out), storage(out), epilogue, alignments)


def address(array) -> int:
    """Return the address of a device array; 0 for None."""
    return 0 if array is None else array.data.ptr


class MatmulPlan:
    """A recipe's cuBLASLt descriptors, and its algorithm once that is chosen."""

    def __init__(self, library: CublasLt, recipe: Recipe, tf32: bool, workspace_bytes: int):
        data_type = cublaslt.DATA_TYPES[recipe.storage]
        tf32 = tf32 and recipe.storage == "float32"
        compute = cublaslt.COMPUTE_TF32 if tf32 else cublaslt.COMPUTE_FLOAT32
        self.recipe = recipe
        self.algorithm = None
        self.times_ms = []
        self._library = library
        self.descriptor = Described(library, "MatmulDesc", compute, cublaslt.DATA_TYPES["float32"])
        self.descriptor.set(cublaslt.TRANSPOSE_A, recipe.a.transposed, ctypes.c_int32)
        self.descriptor.set(cublaslt.TRANSPOSE_B, recipe.b.transposed, ctypes.c_int32)
        self.descriptor.set(cublaslt.EPILOGUE, cublaslt.EPILOGUES[recipe.epilogue], ctypes.c_uint32)
        if "gelu" in recipe.epilogue:
            self.descriptor.set(cublaslt.AUX_LEADING, recipe.d.leading, ctypes.c_int64)
        self.a, self.b, self.d = (
            Described(library, "MatrixLayout", data_type, operand.rows, operand.columns, operand.leading)
            for operand in (recipe.a, recipe.b, recipe.d)
        )
        self.preference = Described(library, "MatmulPreference")
        self.preference.set(cublaslt.WORKSPACE_BYTES, workspace_bytes, ctypes.c_uint64)
        self.preference.set(cublaslt.REDUCTION_SCHEMES, cublaslt.REDUCE_IN_FLOAT32, ctypes.c_uint32)
        for attribute, alignment in zip(cublaslt.ALIGNMENTS_ABCD, recipe.alignments, strict=True):
            self.preference.set(attribute, alignment, ctypes.c_uint32)

    def set_pointers(self, bias: int, aux: int) -> None:
        """Set the epilogue's addresses: of the bias or its gradient, and (aux) of GELU's input."""
        if bias:
            self.descriptor.set(cublaslt.BIAS_POINTER, bias, ctypes.c_uint64)
        if aux:
            self.descriptor.set(cublaslt.AUX_POINTER, aux, ctypes.c_uint64)

    def candidates(self, handle) -> list[HeuristicResult]:
        """Return the algorithms that cuBLASLt expects to be fastest, best first; [] if it has no such epilogue."""
        results = (HeuristicResult * CANDIDATES)()
        found = ctypes.c_int()
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
    """Compute matrix products (device.matmul). time_ms(run): how long run() takes on the stream. workspace: bytes.

    algorithms: {name_of(recipe): an algorithm's 64 bytes} of the choices so far, and of those given.
    """

    def __init__(self, library: CublasLt, stream_pointer: int, workspace, scratch, time_ms, tf32: bool):
        self._library = library
        self._stream = stream_pointer
        self._workspace = workspace
        self._scratch = scratch
        self._time_ms = time_ms
        self._tf32 = tf32
        self._zero = ctypes.c_float(0.0)
        self._one = ctypes.c_float(1.0)
        self.plans: dict[Recipe, MatmulPlan] = {}
        self.algorithms: dict[str, bytes] = {}

    def give(self, algorithms: dict[str, bytes]) -> None:
        """Use these algorithms from now on. They replace earlier choices and timing."""
        for plan in self.plans.values():
            name = name_of(plan.recipe, self._tf32)
            if name in algorithms and algorithms[name] != self.algorithms.get(name):
                plan.algorithm = None
        self.algorithms |= algorithms

    @cached_property
    def _handle(self):
        handle = ctypes.c_void_p()  # for the current GPU
        self._library.cublasLtCreate(ctypes.byref(handle))
        return handle

    def __call__(
        self, out, left, right, *, bias=None, gelu_input=None, dgelu_input=None, left_sums=None, accumulate=False
    ) -> None:
        """Compute out (M, N) = or += left (M, K) @ right (K, N), with at most one of these epilogues.

        bias (N,) is added to the product. bias and gelu_input (M, N): gelu_input = product + bias,
        out = gelu(gelu_input). dgelu_input (M, N): out = product * gelu'(dgelu_input). left_sums (M,) = the row sums of
        left, a bias gradient. NoAlgorithm: cuBLASLt has none.
        """
        recipe = make_recipe(out, left, right, _epilogue(bias, gelu_input, dgelu_input, left_sums))
        if recipe not in self.plans:
            self.plans[recipe] = MatmulPlan(self._library, recipe, self._tf32, self._workspace.nbytes)
        plan = self.plans[recipe]
        plan.set_pointers(
            address(left_sums if bias is None else bias), address(dgelu_input if gelu_input is None else gelu_input)
        )
        if plan.algorithm is None:
            self._choose(plan, out, left, right, accumulate)
        self._run(plan, plan.algorithm, out, left, right, accumulate)

    def _choose(self, plan, out, left, right, accumulate):
        """Use the given algorithm, or time the candidates, on these operands. Trial runs never add to `out`."""
        if accumulate:
            out = self._scratch("matmul", out.shape, out.dtype)
        name = name_of(plan.recipe, self._tf32)
        if name in self.algorithms and self._take_given(plan, self.algorithms[name], out, left, right, accumulate):
            return
        best_ms = math.inf
        for candidate in plan.candidates(self._handle):
            try:
                ms = self._time_ms(lambda: self._run(plan, candidate, out, left, right, accumulate))  # noqa: B023
            except CublasError:  # cuBLASLt proposed this algorithm, but refuses to run it
                ms = math.inf
            plan.times_ms.append(ms)
            if ms < best_ms:
                best_ms = ms
                plan.algorithm = candidate
        if plan.algorithm is None:
            raise NoAlgorithm(f"cuBLASLt has no algorithm for {plan.recipe}")
        self.algorithms[name] = bytes(plan.algorithm.algorithm)

    def _take_given(self, plan, given, out, left, right, accumulate) -> bool:
        content = (ctypes.c_byte * cublaslt.ALGORITHM_BYTES).from_buffer_copy(given)
        algorithm = HeuristicResult(algorithm=content)
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
    """Describe a row-major matrix, or a transposed view of one, as cuBLASLt sees it: column-major."""
    rows, columns = matrix.shape
    row_bytes, column_bytes = matrix.strides
    if column_bytes == matrix.itemsize:
        return Operand(columns, rows, row_bytes // matrix.itemsize)
    if row_bytes == matrix.itemsize:
        return Operand(rows, columns, column_bytes // matrix.itemsize, transposed=True)
    raise ValueError(f"a matrix with strides {matrix.strides}, expected neighbours in rows or columns")


def _alignment(pointer: int) -> int:
    """Return the largest power of two that divides the address, at most LARGEST_ALIGNMENT."""
    return min(pointer & -pointer, LARGEST_ALIGNMENT) if pointer else LARGEST_ALIGNMENT
