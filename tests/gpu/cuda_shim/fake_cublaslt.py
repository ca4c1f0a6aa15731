"""cuBLASLt's thirteen functions in Python, on host memory: what the header says they do, column-major and by address.

Descriptors are dictionaries of the attributes that were set, as bytes; a product reads and writes the memory its
pointers name. So a wrong shape, leading dimension, attribute size or order of arguments gives wrong numbers.
"""

import ctypes
import itertools

import numpy as np

from tests.gpu.cuda_shim.fake_streams import stream_at
from tests.gpu.cuda_shim.memory import to_bfloat16, widen

DTYPES = {0: np.float32, 14: np.uint16}
NOT_SUPPORTED = 15


class FakeFunction:
    """A function that has what ctypes' have: argtypes and restype, checked by converting each argument."""

    def __init__(self, call):
        self.call, self.argtypes, self.restype = call, None, None

    def __call__(self, *arguments):
        assert len(arguments) == len(self.argtypes), "number of arguments"
        for value, kind in zip(arguments, self.argtypes, strict=True):
            kind.from_param(value)
        return self.call(*arguments) or 0


class FakeCublasLt:
    """In place of the CDLL. unsupported: epilogues (by number) without algorithms; refused: an algorithm's number.

    heuristics: how often it was asked for algorithms.
    """

    first_version = 130100

    def __init__(self, unsupported=()):
        self.objects, self._numbers, self.unsupported, self.runs = {}, itertools.count(1), unsupported, []
        self.refused, self.version, self.heuristics = None, self.first_version, 0
        for kind in ("MatmulDesc", "MatrixLayout", "MatmulPreference"):
            setattr(self, f"cublasLt{kind}Create", FakeFunction(self._create))
            setattr(self, f"cublasLt{kind}Destroy", FakeFunction(self._destroy))
            setattr(self, f"cublasLt{kind}SetAttribute", FakeFunction(self._set))
        self.cublasLtCreate, self.cublasLtDestroy = FakeFunction(self._create), FakeFunction(self._destroy)
        self.cublasLtMatmulAlgoGetHeuristic = FakeFunction(self._heuristic)
        self.cublasLtMatmul = FakeFunction(self._matmul)
        self.cublasLtGetVersion = FakeFunction(lambda: self.version)

    def _create(self, result, *arguments):
        number = next(self._numbers)
        self.objects[number] = {"arguments": arguments}
        result._obj.value = number

    def _destroy(self, number):
        del self.objects[_number(number)]

    def _set(self, number, attribute, value, size):
        self.objects[_number(number)][attribute] = ctypes.string_at(ctypes.addressof(value._obj), size)

    def _attribute(self, number, attribute, dtype, default=0):
        data = self.objects[_number(number)].get(attribute)
        return default if data is None else int(np.frombuffer(data, dtype)[0])

    def _heuristic(self, handle, descriptor, a, b, c, d, preference, wanted, results, found):
        self.heuristics += 1
        if self._attribute(descriptor, 7, np.uint32) in self.unsupported:
            return NOT_SUPPORTED
        assert self._attribute(preference, 1, np.uint64) > 0
        for number in range(min(wanted, 3)):
            results[number].algorithm[0] = number
        found._obj.value = min(wanted, 3)

    def _matmul(
        self, handle, descriptor, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout, algorithm,
        workspace, workspace_bytes, stream,
    ):  # fmt: skip
        self.runs.append(ctypes.c_byte.from_address(algorithm).value)
        if self.runs[-1] == self.refused:
            return NOT_SUPPORTED
        matrices = [self._matrix(*pair) for pair in ((a, a_layout), (b, b_layout), (c, c_layout), (d, d_layout))]
        transposed = [self._attribute(descriptor, key, np.int32) for key in (3, 4)]
        scales = [ctypes.c_float.from_address(scale).value for scale in (alpha, beta)]
        epilogue = self._attribute(descriptor, 7, np.uint32, 1)
        epilogue_arguments = [
            self._attribute(descriptor, *key) for key in ((8, np.uint64), (11, np.uint64), (12, "i8"))
        ]

        def work():
            left, right = (
                widen(matrix).T if turned else widen(matrix)
                for matrix, turned in zip(matrices[:2], transposed, strict=True)
            )
            product = scales[0] * (left @ right)
            if scales[1]:
                product = product + scales[1] * widen(matrices[2])
            out = matrices[3]
            out[...] = _as(self._epilogue(epilogue, *epilogue_arguments, product, right, out.dtype), out.dtype)

        queue = stream_at(stream)
        work() if queue is None else queue.add(work)

    @staticmethod
    def _epilogue(epilogue, bias, aux, leading, product, right, dtype):
        if epilogue in (4, 164):
            product = product + widen(_vector(bias, len(product), dtype))[:, None]
        if epilogue == 164:
            _memory(aux, *product.shape, leading, dtype)[...] = _as(product, dtype)
            return gelu(product)
        if epilogue == 192:
            product = product * gelu_slope(widen(_memory(aux, *product.shape, leading, dtype)))
        if epilogue == 512:
            _vector(bias, product.shape[1], dtype)[...] = _as(right.sum(0), dtype)
        return product

    def _matrix(self, pointer, layout):
        data_type, rows, columns, leading = self.objects[_number(layout)]["arguments"]
        return _memory(pointer, rows, columns, leading, DTYPES[data_type])


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gelu_slope(x):
    epsilon = 1e-6
    return (gelu(x + epsilon) - gelu(x - epsilon)) / (2 * epsilon)


def _memory(pointer, rows, columns, leading, dtype):
    """A column-major (rows, columns) view of what lies at an address."""
    size = leading * (columns - 1) + rows
    flat = _vector(pointer, size, dtype)
    return np.lib.stride_tricks.as_strided(flat, (rows, columns), (flat.itemsize, leading * flat.itemsize))


def _vector(pointer, size, dtype):
    kind = ctypes.c_float if dtype == np.float32 else ctypes.c_uint16
    return np.ctypeslib.as_array((kind * size).from_address(pointer))


def _as(values, dtype):
    return to_bfloat16(values) if dtype == np.uint16 else values


def _number(pointer):
    return pointer if isinstance(pointer, int) else pointer.value
