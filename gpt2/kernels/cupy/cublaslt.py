"""cuBLASLt through ctypes: its functions, and Python objects that own its descriptors.

Names and numbers are those of cublasLt.h (CUDA 12 and 13). Matrices are column-major here; matmul.py transposes them.
Descriptors, layouts and preferences need no GPU; the handle and its users do.
"""

import ctypes

from gpt2.kernels.cupy.libraries import open_library

POINTER = ctypes.c_void_p
SIZE = ctypes.c_size_t
INT = ctypes.c_int
UINT64 = ctypes.c_uint64
INT64 = ctypes.c_int64

FUNCTIONS = {
    "cublasLtCreate": [POINTER],
    "cublasLtDestroy": [POINTER],
    "cublasLtMatmulDescCreate": [POINTER, INT, INT],
    "cublasLtMatmulDescDestroy": [POINTER],
    "cublasLtMatmulDescSetAttribute": [POINTER, INT, POINTER, SIZE],
    "cublasLtMatrixLayoutCreate": [POINTER, INT, UINT64, UINT64, INT64],
    "cublasLtMatrixLayoutDestroy": [POINTER],
    "cublasLtMatmulPreferenceCreate": [POINTER],
    "cublasLtMatmulPreferenceDestroy": [POINTER],
    "cublasLtMatmulPreferenceSetAttribute": [POINTER, INT, POINTER, SIZE],
    "cublasLtMatmulAlgoGetHeuristic": [POINTER] * 7 + [INT, POINTER, POINTER],
    "cublasLtMatmul": [POINTER] * 14 + [SIZE, POINTER],
}

DATA_TYPES = {"float32": 0, "bfloat16": 14}
COMPUTE_FLOAT32 = 68
COMPUTE_TF32 = 77
EPILOGUES = {"none": 1, "bias": 4, "gelu_aux_bias": 164, "dgelu": 192, "bgradb": 512}
# Attributes of a descriptor.
TRANSPOSE_A = 3
TRANSPOSE_B = 4
EPILOGUE = 7
BIAS_POINTER = 8
AUX_POINTER = 11
AUX_LEADING = 12
# Attributes of a preference.
WORKSPACE_BYTES = 1
REDUCTION_SCHEMES = 3
ALIGNMENTS_ABCD = (5, 6, 7, 8)
REDUCE_IN_FLOAT32 = 2  # the partial sums of a product that is cut along K are never rounded to the storage type
ALGORITHM_BYTES = 64
NOT_SUPPORTED = 15  # cublasStatus_t: no such algorithm or epilogue


class CublasError(RuntimeError):
    """A function of cuBLASLt returned an error; `status` is its cublasStatus_t."""

    def __init__(self, function: str, status: int):
        super().__init__(f"{function}: cuBLAS status {status}")
        self.status = status


class HeuristicResult(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_byte * ALGORITHM_BYTES),
        ("workspace_bytes", SIZE),
        ("state", INT),
        ("waves", ctypes.c_float),
        ("reserved", INT * 4),
    )


class CublasLt:
    """The library. Its functions check their status: `library.cublasLtMatmul(...)`.

    version: such as 130100. An algorithm's 64 bytes mean the same to all processes with the same version (cuBLAS
    documentation, cublasLtMatmulAlgo_t).
    """

    def __init__(self, library=None):
        self._library = open_library("cublasLt") if library is None else library
        for name, argument_types in FUNCTIONS.items():
            function = getattr(self._library, name)
            function.argtypes = argument_types
            function.restype = INT
            setattr(self, name, _checked(name, function))
        version = self._library.cublasLtGetVersion
        version.argtypes = []
        version.restype = SIZE  # returns the version itself, not a status
        self.version = int(version())


class Described:
    """A descriptor, layout or preference: destroyed with this object. cuBLASLt's functions take its `pointer`."""

    def __init__(self, library: CublasLt, kind: str, *arguments):
        self.pointer = ctypes.c_void_p()
        self._set = getattr(library, f"cublasLt{kind}SetAttribute", None)
        self._destroy = getattr(library, f"cublasLt{kind}Destroy")
        getattr(library, f"cublasLt{kind}Create")(ctypes.byref(self.pointer), *arguments)

    def set(self, attribute: int, value: int, value_type) -> None:
        number = value_type(value)
        self._set(self.pointer, attribute, ctypes.byref(number), ctypes.sizeof(number))

    def __del__(self):
        if self.pointer:
            self._destroy(self.pointer)


def _checked(name, function):
    def call(*arguments):
        status = function(*arguments)
        if status:
            raise CublasError(name, status)

    return call
