"""The items of gpu_check.py that are about being right: what is installed, compiled, and computed.

Each takes gpu_check.Sizes and returns {"lines": report, ...}, with "passed": False where something is wrong.
"""

import time
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

import numpy as np
from cuda_shim import cases
from cuda_shim.memory import to_bfloat16, widen
from cuda_shim.shim import Shim

from gpt2 import cupy_kernels
from gpt2.cupy_kernels import Device
from gpt2.cupy_kernels.compile import SOURCES, STORAGES, cached_code, compile_cubin, nvrtc_version
from gpt2.cupy_kernels.device import CACHE, import_cupy
from gpt2.errors import UserError
from gpt2.kernels import bind, load_kernels
from gpt2.model import new_model
from gpt2.numpy_kernels import Cores
from gpt2.parameters import initialize

PACKAGES = (
    "cupy-cuda13x", "cupy-cuda12x", "ml_dtypes", "numpy", "mpi4py", "torch", "nvidia-cublas", "nvidia-cublas-cu12",
    "nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-frontend", "nvidia-nccl-cu13", "nvidia-cuda-nvrtc",
)  # fmt: skip
MODEL_TOLERANCES = {"float32": 1e-3, "bfloat16": 0.06}  # of a gradient's norm
MARGIN = 64


def environment(sizes):
    """The GPU, driver, and what is installed."""
    cupy = import_cupy()
    runtime, device = cupy.cuda.runtime, Device()
    properties = runtime.getDeviceProperties(0)
    found = {
        "GPU": properties["name"].decode(), "architecture": device.arch, "GPUs": runtime.getDeviceCount(),
        "memory, GB": round(device.memory_bytes / 1e9, 1), "multiprocessors": properties["multiProcessorCount"],
        "driver's CUDA": runtime.driverGetVersion(), "CuPy's CUDA": runtime.runtimeGetVersion(),
        "NVRTC": _nvrtc_version(), "CuPy": cupy.__version__,
        "NCCL for CuPy": _nccl_version(),
    }  # fmt: skip
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return {"lines": [f"{name:22} {value}" for name, value in found.items()], "found": found}


def _nvrtc_version():
    try:
        return ".".join(map(str, nvrtc_version()))
    except UserError as error:
        return str(error)


def _nccl_version():
    try:
        from cupy.cuda import nccl

        return nccl.get_version() if nccl.available else "not found"
    except ImportError as error:
        return str(error)


def compile_all(sizes):
    """Every source for this GPU, into the cache, with what each kernel takes."""
    device, lines, kernels = Device(), [], {}
    for source in SOURCES:
        for storage in STORAGES:
            start = time.perf_counter()
            resources = compile_cubin(source, storage, device.arch).resources
            cached_code(source, storage, device.arch, CACHE)
            lines.append(f"{source} {storage}: {time.perf_counter() - start:.1f} s")
            for kernel, taken in resources.items():
                kernels[f"{kernel} {storage}"] = vars(taken)
                lines.append(f"  {kernel:32} {taken.registers:4} registers {taken.spill_bytes:5} bytes spilled")
    return {"lines": lines, "kernels": kernels, "passed": not any(k["spill_bytes"] for k in kernels.values())}


class Mirror(Shim):
    """A GPU for the tests' cases, whose arrays are NumPy's: each launch copies them there and back.

    On the GPU they are as far from a multiple of 16 bytes as on the host, between margins that no kernel may write to.
    """

    def __init__(self, device):
        super().__init__(None)
        self._device = device

    def launch(self, source, storage, kernel, grid, block, arguments, shared_bytes=0):
        copies = [self._copy(argument) if isinstance(argument, np.ndarray) else None for argument in arguments]
        on_gpu = [a if copy is None else copy[1] for a, copy in zip(arguments, copies, strict=True)]
        self._device.launch(source, storage, kernel, grid, block, tuple(on_gpu), shared_bytes)
        for argument, copy in zip(arguments, copies, strict=True):
            if copy is not None:
                self._copy_back(argument, copy[0])

    def _copy(self, array):
        start = MARGIN + array.ctypes.data % 16
        host = np.full(start + array.nbytes + MARGIN, 0xFF, np.uint8)
        host[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        buffer = self._device.cupy.asarray(host)
        return buffer, buffer[start : start + array.nbytes]

    def _copy_back(self, array, buffer):
        host, start = self._device.download(buffer), MARGIN + array.ctypes.data % 16
        array[...] = host[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        assert (host[:start] == 0xFF).all(), "a kernel wrote before an array"
        assert (host[start + array.nbytes :] == 0xFF).all(), "a kernel wrote past an array"


def kernels(sizes):
    """The tests' cases, in both storages, twice: against NumPy, and the same bits again."""
    device, lines, passed = Mirror(Device()), [], True
    for name, _, all_sizes in cases.CASES:
        for storage in STORAGES:
            errors = [error for some in all_sizes if (error := _case_error(device, name, storage, some))]
            lines.append(f"{name.removesuffix('_case'):20} {storage:9} {'; '.join(errors) or 'as NumPy has it'}")
            passed = passed and not errors
    return {"lines": lines, "passed": passed}


def _case_error(device, name, storage, case_sizes) -> str | None:
    """What is wrong with one case, in a line."""
    try:
        first, again = (cases.run(device, Cores(1), name, storage, case_sizes) for _ in range(2))
    except AssertionError as error:
        wanted = ("Mismatched", "Max absolute", "nan", "wrote")
        what = [line.strip() for line in str(error).splitlines() if line.strip().startswith(wanted)]
        return f"{case_sizes}: {', '.join(what) or str(error)[:200]}"
    if any(a.tobytes() != b.tobytes() for a, b in zip(first, again, strict=True)):
        return f"{case_sizes}: other bits the second time"
    return None


def model(sizes):
    """Loss and every gradient of a few layers at full width, two micro-steps, against NumPy."""
    config = replace(sizes.model, n_layer=sizes.checked_layers)
    lines, passed = [], True
    for storage in STORAGES:
        for options in ({"fused_gelu": True}, {"fused_gelu": False}) if storage == "bfloat16" else ({},):
            errors, losses = _gradient_errors(Device(**options), config, storage, sizes)
            worst = max(errors, key=errors.get)
            good = errors[worst] < MODEL_TOLERANCES[storage] and abs(losses[0] / losses[1] - 1) < 1e-2
            passed = passed and good
            lines.append(
                f"{storage} {options or ''}: loss {losses[0]:.6g} against {losses[1]:.6g}; largest relative error of a "
                f"gradient {errors[worst]:.2g} ({worst}){'' if good else ': WRONG'}"
            )
    return {"lines": lines, "passed": passed}


def _gradient_errors(device, config, storage, sizes):
    B, T = 2, sizes.checked_length
    reference = new_model(config, load_kernels("numpy", 8), B, T)
    initialize(reference.parameters, seed=3)
    host = to_bfloat16(reference.parameters.flat) if storage == "bfloat16" else reference.parameters.flat
    reference.parameters.flat[:] = widen(host)
    ours = new_model(config, bind(cupy_kernels, device), B, T, dtype_of(storage))
    ours.parameters.flat[:] = device.cupy.asarray(host).view(dtype_of(storage))
    random, losses = np.random.default_rng(5), []
    for micro_step in range(2):
        tokens = random.integers(config.vocab_size, size=(B, T + 1)).astype(np.int32)
        losses = [m.forward(tokens[:, :-1], tokens[:, 1:], 0.5 / (B * T)) for m in (ours, reference)]
        for m in (ours, reference):
            m.backward(accumulate=micro_step > 0)
    flat, layout = device.download(ours.gradients.flat), ours.parameters.layout
    flat = widen(flat.view(np.uint16) if storage == "bfloat16" else flat)
    return {t.name: _relative_error(flat[t.start : t.stop], reference.gradients.flat[t.start : t.stop], t.name,
                                    config.n_embd) for t in layout.tensors}, losses  # fmt: skip


def _relative_error(got, expected, name, C):
    """Of the norms. The loss does not depend on the key biases: their gradient is rounding noise, and left out."""
    if name.endswith("qkv_bias"):
        got, expected = (np.delete(values, slice(C, 2 * C)) for values in (got, expected))
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def dtype_of(storage):
    """The array dtype of a storage; CuPy's bfloat16 is ml_dtypes'."""
    if storage == "float32":
        return np.dtype(np.float32)
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


ITEMS = {"environment": environment, "compile": compile_all, "kernels": kernels, "model": model}
