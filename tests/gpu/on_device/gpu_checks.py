"""The items of gpu_check.py about the machine: what is installed, compilation, copies, launches.

Each takes gpu_check.Sizes and returns {"lines": report, ...}, with "passed": False where something is wrong.
"""

import time
from importlib.metadata import PackageNotFoundError, version

import numpy as np

from gpt2.errors import UserError
from gpt2.files import user_cache_folder
from gpt2.kernels.cupy import Device, launch
from gpt2.kernels.cupy.compile import SOURCES, STORAGES, compile_cubin, keep_code, nvrtc_version
from scripts.machine.gpu import PACKAGES, copy_rate, gpu_facts, random_on_gpu
from tests.gpu.kernel_resources import parse_log


def environment(sizes):
    """The GPU, driver, and what is installed."""
    found = gpu_facts(Device()) | {"NVRTC": _nvrtc_version(), "NCCL for CuPy": _nccl_version()}
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
            code, log = compile_cubin(source, storage, device.arch)
            keep_code(code, source, storage, device.arch, user_cache_folder())
            lines.append(f"{source} {storage}: {time.perf_counter() - start:.1f} s")
            for kernel, (registers, spilled) in parse_log(log).items():
                kernels[f"{kernel} {storage}"] = {"registers": registers, "spill_bytes": spilled}
                lines.append(f"  {kernel:32} {registers:4} registers {spilled:5} bytes spilled")
    return {"lines": lines, "kernels": kernels, "passed": not any(k["spill_bytes"] for k in kernels.values())}


def copies(sizes):
    """GB/s between pinned host memory and the GPU, each way, and within the GPU."""
    device, size = Device(), sizes.copy_bytes
    pinned, one = device.pinned(size // 4), device.empty((size,), np.uint8)
    runs = {
        "host to GPU": lambda: one.data.copy_from_host_async(pinned.ctypes.data, size, device.stream),
        "GPU to host": lambda: one.data.copy_to_host_async(pinned.ctypes.data, size, device.stream),
    }
    rates = {name: size / device.time_ms(run) / 1e6 for name, run in runs.items()}
    rates["GPU to GPU, read and written"] = copy_rate(device, size) / 1e9
    return {"lines": [f"{name:30} {rate:8.1f} GB/s" for name, rate in rates.items()], "rates": rates}


def launches(sizes):
    """The host's microseconds for a launch, and for a product whose plan is there."""
    device, count = Device(), 1000
    small, square = random_on_gpu(device, 64), random_on_gpu(device, 64, 64)
    out = device.empty(square.shape, square.dtype)
    calls = {
        "kernel": lambda: launch.gelu_backward(device, small, small),
        "product": lambda: device.matmul(out, square, square),
    }
    microseconds = {name: _host_microseconds(device, call, count) for name, call in calls.items()}
    return {"lines": [f"{name:10} {value:.1f} us" for name, value in microseconds.items()], "us": microseconds}


def _host_microseconds(device, call, count):
    call()
    device.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    seconds = time.perf_counter() - start
    device.synchronize()
    return seconds / count * 1e6


ITEMS = {"environment": environment, "compile": compile_all, "copies": copies, "launches": launches}
