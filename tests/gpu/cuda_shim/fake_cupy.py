"""A CuPy whose GPU is the CPU shim: as much of it as the project uses.

Arrays are NumPy's with a `data.ptr`, machine code is the name of what it was compiled from. What is queued on streams
is done late (fake_streams.py), and copies treat host memory as CUDA does: pinned or not. bfloat16 is ml_dtypes', as in
CuPy, but rounded and widened by hand (memory.py), so that it checks what is done by ml_dtypes elsewhere.
"""

import ctypes
import mmap
import sys
import types
import weakref
from types import SimpleNamespace

import ml_dtypes
import numpy as np

from tests.gpu.cuda_shim import fake_nccl
from tests.gpu.cuda_shim.fake_streams import Event, Stream, event_query
from tests.gpu.cuda_shim.memory import to_bfloat16, widen

BYTES = 140 << 30
ALIGNMENT = 512  # of what CuPy allocates
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class ndarray(np.ndarray):
    """NumPy's, with what of CuPy's is used; whatever touches values keeps its place on the current stream."""

    @property
    def data(self):
        return Pointer(self)

    def get(self, stream=None):
        stream = stream or Stream.current
        if not self.flags.c_contiguous:  # CuPy makes it so on that stream
            with stream:
                pass
        stream.run()
        return np.array(self)

    def set(self, host):
        Stream.current.run()
        np.asarray(self)[...] = host

    def fill(self, value):
        self[...] = value

    def __setitem__(self, key, value):
        assert isinstance(value, ndarray) or np.isscalar(value), "CuPy takes no host arrays here"
        target = np.asarray(self)
        Stream.current.add(lambda: target.__setitem__(key, _cast(value, target.dtype)))

    def copy(self):
        Stream.current.run()
        return super().copy()

    def astype(self, dtype):
        Stream.current.run()
        return _cast(self, np.dtype(dtype)).view(ndarray)

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **options):
        """What goes into arrays that are there is queued; a new one is made at once."""
        assert all(value.itemsize != 2 for value in inputs if isinstance(value, ndarray)), "arithmetic in bfloat16"
        inputs = [np.asarray(value) if isinstance(value, ndarray) else value for value in inputs]
        if out is not None:
            targets = tuple(np.asarray(array) for array in out)
            Stream.current.add(lambda: getattr(ufunc, method)(*inputs, out=targets, **options))
            return out[0]
        Stream.current.run()
        result = getattr(ufunc, method)(*inputs, **options)
        return result.view(ndarray) if isinstance(result, np.ndarray) else result


def _cast(value, dtype):
    """To and from bfloat16 by hand; the rest is NumPy's."""
    if not isinstance(value, ndarray):
        return value
    value = np.asarray(value)
    if dtype == BFLOAT16 and value.dtype.kind == "f":
        return to_bfloat16(value).view(BFLOAT16)
    return (widen(value) if value.dtype == BFLOAT16 and dtype.kind == "f" else value).astype(dtype)


class Pointer:
    """cupy.cuda.MemoryPointer."""

    def __init__(self, array):
        self._array, self.ptr = array, array.ctypes.data

    def copy_from_host_async(self, host, nbytes, stream):
        source = host if Host.is_pinned(host, nbytes) else ctypes.create_string_buffer(ctypes.string_at(host, nbytes))
        self._queue(stream, self.ptr, source, nbytes)

    def copy_to_host_async(self, host, nbytes, stream):
        self._queue(stream, host, self.ptr, nbytes)
        if not Host.is_pinned(host, nbytes):
            stream.run()

    def copy_from_device_async(self, other, nbytes, stream):
        self._queue(stream, self.ptr, other.ptr, nbytes)

    def _queue(self, stream, to, source, nbytes):
        assert nbytes <= self._array.nbytes, "beyond the array"
        memory = self._array  # kept until the copy is made
        stream.add(lambda: memory is None or ctypes.memmove(to, source, nbytes), is_copy=True)


class Host:
    """Which host memory is pinned: address and bytes; how many pieces of it have been registered."""

    pinned, refuses, registered = {}, False, 0

    @classmethod
    def is_pinned(cls, address, nbytes):
        return any(start <= address and address + nbytes <= start + size for start, size in cls.pinned.items())

    @classmethod
    def empty(cls, shape, dtype):
        array = np.empty(shape, dtype)
        cls.pinned[array.ctypes.data] = array.nbytes
        weakref.finalize(array, cls.pinned.pop, array.ctypes.data, None)
        return array

    @classmethod
    def register(cls, address, nbytes, flags):
        first, last = address // mmap.PAGESIZE, (address + nbytes - 1) // mmap.PAGESIZE
        overlaps = any(
            start // mmap.PAGESIZE <= last and first <= (start + size - 1) // mmap.PAGESIZE
            for start, size in cls.pinned.items()
        )
        if cls.refuses or overlaps:
            raise CUDARuntimeError("cudaErrorHostMemoryAlreadyRegistered or another")
        cls.pinned[address] = nbytes
        cls.registered += 1

    @classmethod
    def unregister(cls, address):
        del cls.pinned[address]
        cls.registered -= 1


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
            assert all(argument is None or isinstance(argument, np.generic | ndarray) for argument in arguments)
            arguments = [np.asarray(a) if isinstance(a, ndarray) else a for a in arguments]
            launch = self._source, self._storage, name, grid, block, arguments, shared_mem
            (stream or Stream.current).add(lambda: Module.shim.launch(*launch))

        return SimpleNamespaceCallable(call)


class SimpleNamespaceCallable:
    ptr = 3

    def __init__(self, call):
        self._call = call

    def __call__(self, *arguments, **options):
        return self._call(*arguments, **options)


class Device:
    compute_capability = "90"
    attributes = {  # noqa: RUF012
        "MaxSharedMemoryPerBlockOptin": 232448, "MaxSharedMemoryPerMultiprocessor": 233472, "MultiProcessorCount": 132,
    }  # fmt: skip

    def __init__(self, index=0):
        self.pci_bus_id = f"0000:{index:02x}:00.0"

    def use(self):
        return self


def aligned(shape, dtype):
    """Zeros that begin where CuPy's pool lets arrays begin: which algorithms a product may have depends on that."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + nbytes].view(dtype).reshape(shape).view(ndarray)


class Memory:
    free = BYTES

    @classmethod
    def zeros(cls, shape, dtype=np.float32):
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if nbytes > cls.free:
            raise OutOfMemoryError
        if cls.free < BYTES:  # a small GPU, none of whose memory comes back
            cls.free -= nbytes
        return aligned(shape, dtype)


def install(monkeypatch, shim, gpus=1, capability="90", nccl=False, lag="copies", free=BYTES, pins=True):
    """Put this CuPy into sys.modules for one test, with so many GPUs (None: no driver) and so much memory on each."""
    Module.shim, Device.compute_capability, Memory.free, Host.refuses = shim, capability, free, not pins
    Stream.reset(lag)

    def get_device_count():
        if gpus is None:
            raise CUDARuntimeError("cudaErrorInsufficientDriver: CUDA driver version is insufficient")
        return gpus

    runtime = SimpleNamespace(
        getDeviceCount=get_device_count, CUDARuntimeError=CUDARuntimeError,
        memGetInfo=lambda: (BYTES // 2 if Memory.free == BYTES else Memory.free, BYTES),
        driverGetVersion=lambda: 13000, runtimeGetVersion=lambda: 13000, eventQuery=event_query,
        hostRegister=Host.register, hostUnregister=Host.unregister,
        getDeviceProperties=lambda index: {"name": b"shim", "multiProcessorCount": 1, "uuid": bytes([1, index])},
    )  # fmt: skip
    cuda = types.ModuleType("cupy.cuda")
    cuda.runtime, cuda.Device, cuda.Stream, cuda.Event = runtime, Device, Stream, Event
    cuda.get_elapsed_time = lambda start, stop: 1.0
    cuda.function = SimpleNamespace(Module=Module)
    cuda.memory = SimpleNamespace(OutOfMemoryError=OutOfMemoryError)
    cuda.nccl = fake_nccl.module(nccl)
    cuda.driver = SimpleNamespace(
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8, funcSetAttribute=lambda function, attribute, value: None
    )
    cupy = types.ModuleType("cupy")
    cupy.cuda, cupy.ndarray, cupy.zeros, cupy.__version__ = cuda, ndarray, Memory.zeros, "14.fake"
    cupy.asarray = lambda array, dtype=None: np.array(array, dtype).view(ndarray)
    cupyx = types.ModuleType("cupyx")
    cupyx.empty_pinned = Host.empty
    monkeypatch.setitem(sys.modules, "cudnn", None)
    for name, module in (("cupy", cupy), ("cupy.cuda", cuda), ("cupyx", cupyx)):
        monkeypatch.setitem(sys.modules, name, module)
