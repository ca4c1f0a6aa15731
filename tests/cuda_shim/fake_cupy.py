"""A CuPy whose GPU is the CPU shim: as much of it as gpt2/cupy_kernels/device.py and scripts/gpu_check.py use.

Arrays are NumPy's with a `data.ptr`; machine code is the name of what it was compiled from; streams and events are
there for their order alone: a copy that is not waited for is carried out when its stream is next waited for.
"""

import sys
import types
from types import SimpleNamespace

import numpy as np

BYTES = 140 << 30


class ndarray(np.ndarray):
    """NumPy's, with the three things of CuPy's that are used: .data.ptr, .get(), and asynchronous copies."""

    @property
    def data(self):
        return Pointer(self)

    def get(self, stream=None):
        if stream is not None:
            stream.synchronize()
        return np.array(self)


class Pointer:
    """cupy.cuda.MemoryPointer."""

    def __init__(self, array):
        self._array, self.ptr = array, array.ctypes.data

    def copy_from_host_async(self, host, nbytes, stream):
        stream.pending.append((self.ptr, host, nbytes))

    def copy_to_host_async(self, host, nbytes, stream):
        stream.pending.append((host, self.ptr, nbytes))

    def copy_from_device_async(self, other, nbytes, stream):
        stream.pending.append((self.ptr, other.ptr, nbytes))


class Stream:
    def __init__(self, non_blocking=False):
        self.pending, self.ptr = [], 5

    def use(self):
        return self

    def synchronize(self):
        import ctypes

        for to, source, nbytes in self.pending:
            ctypes.memmove(to, source, nbytes)
        self.pending.clear()


class Event:
    def __init__(self, block=False, disable_timing=False):
        self._stream = None

    def record(self, stream=None):
        self._stream = stream

    def synchronize(self):
        if self._stream is not None:
            self._stream.synchronize()


class OutOfMemoryError(MemoryError):
    pass


class CUDARuntimeError(RuntimeError):
    pass


class Module:
    """Runs its kernels on the shim; "machine code" is "source storage"."""

    shim = None

    def load(self, code):
        self._source, self._storage = code.decode().split()

    def get_function(self, name):
        def call(grid, block, arguments, shared_mem=0, stream=None):
            stream.synchronize()
            assert all(argument is None or isinstance(argument, np.generic | ndarray) for argument in arguments)
            arguments = [np.asarray(a) if isinstance(a, ndarray) else a for a in arguments]
            Module.shim.launch(self._source, self._storage, name, grid, block, arguments, shared_mem)

        return SimpleNamespaceCallable(call)


class SimpleNamespaceCallable:
    ptr = 3

    def __init__(self, call):
        self._call = call

    def __call__(self, *arguments, **options):
        return self._call(*arguments, **options)


class Device:
    compute_capability = "90"
    attributes = {"MaxSharedMemoryPerBlockOptin": 232448, "MultiProcessorCount": 132}  # noqa: RUF012

    def __init__(self, index=0):
        pass

    def use(self):
        return self


def zeros(shape, dtype=np.float32):
    if np.prod(shape) * np.dtype(dtype).itemsize > BYTES:
        raise OutOfMemoryError
    return np.zeros(shape, dtype).view(ndarray)


def install(monkeypatch, shim, gpus=1, capability="90"):
    """Put this CuPy into sys.modules for one test, with so many GPUs (None: no driver)."""
    Module.shim, Device.compute_capability = shim, capability

    def get_device_count():
        if gpus is None:
            raise CUDARuntimeError("cudaErrorInsufficientDriver: CUDA driver version is insufficient")
        return gpus

    runtime = SimpleNamespace(
        getDeviceCount=get_device_count, CUDARuntimeError=CUDARuntimeError, memGetInfo=lambda: (BYTES // 2, BYTES),
        driverGetVersion=lambda: 13000, runtimeGetVersion=lambda: 13000,
        getDeviceProperties=lambda index: {"name": b"shim", "multiProcessorCount": 1},
    )  # fmt: skip
    cuda = types.ModuleType("cupy.cuda")
    cuda.runtime, cuda.Device, cuda.Stream, cuda.Event = runtime, Device, Stream, Event
    cuda.get_elapsed_time = lambda start, stop: 1.0
    cuda.function = SimpleNamespace(Module=Module)
    cuda.memory = SimpleNamespace(OutOfMemoryError=OutOfMemoryError)
    cuda.driver = SimpleNamespace(
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8, funcSetAttribute=lambda function, attribute, value: None
    )
    cupy = types.ModuleType("cupy")
    cupy.cuda, cupy.ndarray, cupy.zeros, cupy.__version__ = cuda, ndarray, zeros, "14.fake"
    cupy.asarray = lambda array, dtype=None: np.array(array, dtype).view(ndarray)
    cupyx = types.ModuleType("cupyx")
    cupyx.empty_pinned = lambda shape, dtype: np.empty(shape, dtype)
    ml_dtypes = types.ModuleType("ml_dtypes")
    ml_dtypes.bfloat16 = np.uint16
    monkeypatch.setitem(sys.modules, "cudnn", None)
    for name, module in (("cupy", cupy), ("cupyx", cupyx), ("ml_dtypes", ml_dtypes)):
        monkeypatch.setitem(sys.modules, name, module)
