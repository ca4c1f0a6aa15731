"""One NVIDIA GPU under CuPy: a stream, memory, the kernels' machine code, and matrix products.

Everything is queued on one stream. This stream also becomes CuPy's current one, so that plain CuPy operations on these
arrays run in order. It is entered and never left: CuPy would forget a stream set by Stream.use() at the end of the next
`with`, ours or one inside CuPy.
"""

import numpy as np

from gpt2.errors import UserError
from gpt2.files import user_cache_folder
from gpt2.kernels.cupy.compile import cached_code
from gpt2.kernels.cupy.cublaslt import CublasLt
from gpt2.kernels.cupy.cudnn_attention import CudnnAttention
from gpt2.kernels.cupy.faster_of import FasterOf
from gpt2.kernels.cupy.launch import SHARED_BYTES
from gpt2.kernels.cupy.matmul import Matmul

OLDEST_CAPABILITY = 80  # 8.0: bfloat16 on tensor cores, and asynchronous copies
WORKSPACE_BYTES = 32 << 20  # NVIDIA's recommendation for cuBLAS on Hopper
TIMED_RUNS = 3


class Device:
    """The `index`-th GPU that CUDA shows to this process.

    tf32: float32 products use tensor cores, with 10 bits of mantissa. epilogues: compute GELU and bias gradients in the
    epilogues of products "always", "never", or where it is "faster". attention: use "cudnn", our "own" kernels, or the
    "faster" of them, for bfloat16.

    spare: None, or a large array whose contents are not needed now. multiprocessors, multiprocessor_bytes: how
    many there are, and the shared memory of each. cudnn_attention: cuDNN's attention, or None.
    """

    def __init__(self, index: int = 0, tf32: bool = False, epilogues: str = "faster", attention: str = "faster"):
        self.cupy = cupy = import_cupy()
        self.arch = use_gpu(cupy, index)
        self._cache = user_cache_folder()
        self._functions = {}
        self._modules = {}
        self._shared_bytes = {}
        self._scratch = {}
        self._uploads = {}
        self._constants = {}
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.stream.__enter__()
        self.memory_bytes = cupy.cuda.runtime.memGetInfo()[1]
        attributes = cupy.cuda.Device(index).attributes
        self._most_shared_bytes = attributes["MaxSharedMemoryPerBlockOptin"]
        self.multiprocessors = attributes["MultiProcessorCount"]
        self.multiprocessor_bytes = attributes["MaxSharedMemoryPerMultiprocessor"]
        self.spare = None
        nvtx = getattr(cupy.cuda, "nvtx", None)
        if nvtx is not None and nvtx.available:  # nested ranges on a profiler's timeline
            self.range_push = nvtx.RangePush
            self.range_pop = nvtx.RangePop
        workspace = self.scratch("workspace", (WORKSPACE_BYTES,), np.uint8)
        library = CublasLt()
        self.matmul = Matmul(library, self.stream.ptr, workspace, self.scratch, self.time_ms, tf32)
        self.faster_of = FasterOf(self.time_ms, epilogues, attention)
        self.cudnn_attention = None
        if attention != "own":
            try:
                self.cudnn_attention = CudnnAttention(self)
            except UserError:
                if attention == "cudnn":
                    raise
        self.maker = {
            "device": cupy.cuda.runtime.getDeviceProperties(index)["name"].decode(),
            "cublaslt": library.version,
            "cudnn": self.cudnn_attention and self.cudnn_attention.version,
        }

    def choices(self) -> dict:
        """Return the choices made by timing so far, for JSON: "products" and "ways", and the fields of `maker`.

        Other choices are as correct, but round differently. With these, a process of the same maker gets equal bits.
        """
        ways = [[work, list(shape), kind, theirs] for (work, shape, kind), theirs in self.faster_of.choices.items()]
        products = {name: algorithm.hex() for name, algorithm in self.matmul.algorithms.items()}
        return self.maker | {"products": products, "ways": ways}

    def timed(self) -> int:
        """Return the number of choices that had to be timed, because they were not given or did not run here."""
        return sum(bool(plan.times_ms) for plan in self.matmul.plans.values()) + len(self.faster_of.times_ms)

    def give_choices(self, choices: dict) -> None:
        """Use the choices of a process with the same maker, and time only choices that are missing there."""
        self.matmul.give({name: bytes.fromhex(text) for name, text in choices["products"].items()})
        ways = {(work, tuple(shape), kind): theirs for work, shape, kind, theirs in choices["ways"]}
        self.faster_of.choices.update(ways)

    def launch(self, source, storage, kernel, grid, block, arguments, shared_bytes=0):
        """Queue a kernel of compile.SOURCES on CuPy's current stream: this device's, except in `with` another stream.

        arguments: arrays, NumPy scalars and None (null).
        """
        function = self._functions.get((kernel, storage)) or self._load(source, storage, kernel)
        if shared_bytes > self._shared_bytes[kernel, storage]:
            self._allow_shared(function, kernel, storage, shared_bytes)
        function(grid, block, arguments, shared_mem=shared_bytes)

    def _load(self, source, storage, kernel):
        if (source, storage) not in self._modules:
            module = self._modules[source, storage] = self.cupy.cuda.function.Module()
            module.load(cached_code(source, storage, self.arch, self._cache))
        self._shared_bytes[kernel, storage] = SHARED_BYTES
        function = self._functions[kernel, storage] = self._modules[source, storage].get_function(kernel)
        return function

    def _allow_shared(self, function, kernel, storage, shared_bytes):
        """Request more dynamic shared memory than the default, once for each kernel."""
        if shared_bytes > self._most_shared_bytes:
            raise UserError(
                f"{kernel} in {storage} takes {shared_bytes} bytes of shared memory, this GPU has "
                f"{self._most_shared_bytes}: use --dtype bfloat16 or smaller heads"
            )
        driver = self.cupy.cuda.driver
        driver.funcSetAttribute(function.ptr, driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
        self._shared_bytes[kernel, storage] = shared_bytes

    def empty(self, shape, dtype):
        """Return zeros. UserError: out of memory."""
        try:
            return self.cupy.zeros(shape, dtype)
        except self.cupy.cuda.memory.OutOfMemoryError:
            wanted = np.prod(shape) * np.dtype(dtype).itemsize
            free = self.cupy.cuda.runtime.memGetInfo()[0]
            raise UserError(
                f"out of GPU memory: {wanted / 1e9:.2f} GB asked for, {free / 1e9:.2f} GB free of "
                f"{self.memory_bytes / 1e9:.0f} GB: lower --batch-size"
            ) from None

    def used_bytes(self) -> int:
        """Return the bytes of GPU memory in use now, by this process and by others on the GPU."""
        return self.memory_bytes - self.cupy.cuda.runtime.memGetInfo()[0]

    def scratch(self, name, shape, dtype):
        """Return an uninitialized array. It belongs to the caller until the same name is asked for again."""
        needed_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if name not in self._scratch or self._scratch[name].nbytes < needed_bytes:
            self._scratch[name] = self.empty((needed_bytes,), np.uint8)
        return self._scratch[name][:needed_bytes].view(dtype).reshape(shape)

    def workspace(self, name, byte_count: int):
        """Return uninitialized bytes for one kernel: in `spare` if they fit, else in scratch of that name."""
        if self.spare is not None and self.spare.nbytes >= byte_count:
            return self.spare.reshape(-1).view(np.uint8)[:byte_count]
        return self.scratch(name, (byte_count,), np.uint8)

    def upload(self, name, array):
        """Return an int32 copy of a host array, valid until the same name is uploaded again. Does not wait for it."""
        array = np.asarray(array)
        if name not in self._uploads or len(self._uploads[name][0]) < array.size:
            import cupyx

            self.synchronize()  # a copy from the smaller buffer may be in progress
            pinned = cupyx.empty_pinned(array.size, np.int32)
            self._uploads[name] = pinned, self.empty((array.size,), np.int32), self.cupy.cuda.Event(disable_timing=True)
        pinned, copy, copied = self._uploads[name]
        copied.synchronize()  # the previous copy may still read this pinned memory
        pinned[: array.size] = array.reshape(-1)
        copy.data.copy_from_host_async(pinned.ctypes.data, array.size * pinned.itemsize, self.stream)
        copied.record(self.stream)
        return copy[: array.size].reshape(array.shape)

    def constant(self, array):
        """Return a copy of a small host array. It is kept until the process ends."""
        key = array.dtype.str, array.shape, array.tobytes()
        if key not in self._constants:
            self._constants[key] = self.cupy.asarray(array)
        return self._constants[key]

    def download(self, array) -> np.ndarray:
        """Return a copy on the host, made after all work queued before."""
        return array.get(stream=self.stream)

    def synchronize(self) -> None:
        """Wait for everything that was queued. Errors of kernels are raised here."""
        self.stream.synchronize()

    def time_ms(self, run) -> float:
        """Return the milliseconds of one run() on the GPU: the mean of a few runs, after a warm-up."""
        start = self.new_event()
        stop = self.new_event()
        run()
        start.record(self.stream)
        for _ in range(TIMED_RUNS):
            run()
        stop.record(self.stream)
        stop.synchronize()
        return self.elapsed_ms(start, stop) / TIMED_RUNS

    def new_event(self):
        """Return an event, to mark a point in the stream: event.record(device.stream)."""
        return self.cupy.cuda.Event()

    def elapsed_ms(self, start, stop) -> float:
        """Return the milliseconds between two events that have passed."""
        return self.cupy.cuda.get_elapsed_time(start, stop)


def import_cupy():
    """Import CuPy. UserError: CuPy, or ml_dtypes with its bfloat16, is not installed."""
    try:
        import cupy
        import cupyx  # noqa: F401
        import ml_dtypes  # noqa: F401 - before CuPy, which builds its bfloat16 operations when imported
    except ImportError as error:
        raise UserError(
            f"--backend cupy: {error}, expected CuPy and ml_dtypes: pip install gpt2-mpi[gpu-cuda13] ml_dtypes "
            "(gpu-cuda12 for CUDA 12), or use --backend numpy"
        ) from None
    return cupy


def use_gpu(cupy, index: int) -> str:
    """Make the GPU current and return its architecture. UserError: there is none, or it is too old."""
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:  # no driver, one older than CuPy's CUDA, or no GPU
        reason = str(error).splitlines()[0]
        raise UserError(f"--backend cupy: no GPU ({reason}), expected an NVIDIA GPU and its driver: "
                        "run where nvidia-smi shows one, or use --backend numpy") from None  # fmt: skip
    if index >= count:
        raise UserError(f"GPU {index} of {count}: ask for fewer ranks a node, or give each its GPU (--gpus-per-task=1)")
    cupy.cuda.Device(index).use()
    capability = cupy.cuda.Device(index).compute_capability
    if int(capability) < OLDEST_CAPABILITY:
        raise UserError(
            f"--backend cupy: a GPU of compute capability {capability[:-1]}.{capability[-1]}, expected 8.0 or newer "
            "(A100 and later): use --backend numpy"
        )
    return "sm_90a" if capability == "90" else f"sm_{capability}"  # Hopper with its own features
