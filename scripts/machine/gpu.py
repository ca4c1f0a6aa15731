"""Describe the measured GPU: name, software, datasheet rate, and measured rates."""

import ctypes
import math

import numpy as np

# Datasheet TFLOP/s of dense bfloat16 products with float32 sums, by a part of the GPU's name; the first match counts.
PEAK_TFLOPS = {
    "H200 NVL": 835, "H200": 990, "GH200": 990, "H100 PCIe": 756, "H100 NVL": 835, "H100": 990, "A100": 312,
    "L40S": 362, "RTX 4090": 165, "RTX 3090": 71,
}  # fmt: skip
# GPUs whose name contains a key of PEAK_TFLOPS but whose rate differs: MIG instances and variants.
OTHERS = ("MIG ", "Laptop", "RTX 4090 D", "RTX 3090 Ti")
# Facts from NVML, the driver's library: {name: (function, arguments, divisor)}.
GRAPHICS_CLOCK = 0
LIMITS = {
    "power_w": ("nvmlDeviceGetEnforcedPowerLimit", (), 1000),
    "default_power_w": ("nvmlDeviceGetPowerManagementDefaultLimit", (), 1000),
    "clock_mhz": ("nvmlDeviceGetApplicationsClock", (GRAPHICS_CLOCK,), 1),
    "default_clock_mhz": ("nvmlDeviceGetDefaultApplicationsClock", (GRAPHICS_CLOCK,), 1),
    "most_clock_mhz": ("nvmlDeviceGetMaxClockInfo", (GRAPHICS_CLOCK,), 1),
}
RANDOM_VALUES = (1 << 22) + 13
RATE_REPEATS = 3


def gpu_facts(device) -> dict:
    """Return the name, memory and software of the GPU of a gpt2.kernels.cupy.Device."""
    runtime = device.cupy.cuda.runtime
    properties = runtime.getDeviceProperties(0)
    return {
        "GPU": properties["name"].decode(), "architecture": device.arch, "GPUs": runtime.getDeviceCount(),
        "memory, GB": round(device.memory_bytes / 1e9, 1), "multiprocessors": properties["multiProcessorCount"],
        "driver's CUDA": runtime.driverGetVersion(), "CuPy's CUDA": runtime.runtimeGetVersion(),
        "CuPy": device.cupy.__version__,
    }  # fmt: skip


def gpu_limits(bus_id: str) -> dict[str, int]:
    """Return the values of LIMITS that the driver reports for the GPU at a PCI bus ID."""
    found = {}
    device = ctypes.c_void_p()
    number = ctypes.c_uint()
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return found
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByPciBusId_v2(bus_id.encode(), ctypes.byref(device)):
        return found
    for name, (function, given, unit) in LIMITS.items():
        if hasattr(nvml, function) and getattr(nvml, function)(device, *given, ctypes.byref(number)) == 0:
            found[name] = number.value // unit
    return found


def limits_text(gpu: dict) -> str:
    """Return "NVIDIA H200, 700 W, 1980 MHz": name, power limit and highest clock, if known."""
    clock = gpu.get("most_clock_mhz")
    if 0 < gpu.get("clock_mhz", 0) < gpu.get("default_clock_mhz", 0):
        clock = gpu["clock_mhz"]
    known = ((gpu.get("power_w"), "W"), (clock, "MHz"))
    return ", ".join([gpu["name"], *(f"{number} {unit}" for number, unit in known if number)])


def peak_tflops(name: str) -> float | None:
    """Return the datasheet's TFLOP/s of the GPU with this name; None if it is not in the table."""
    if any(other in name for other in OTHERS):
        return None
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)


def dtype_of(storage: str) -> np.dtype:
    """Return the array dtype for "float32" or "bfloat16"; CuPy takes bfloat16 from ml_dtypes."""
    if storage == "float32":
        return np.dtype(np.float32)
    import ml_dtypes  # imported here because a stand-in for CuPy does without it

    return np.dtype(ml_dtypes.bfloat16)


def on_gpu(device, values, storage: str):
    """Copy float32 host values to the GPU; bfloat16 is rounded to nearest, ties to even."""
    if storage == "float32":
        return device.cupy.asarray(values)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return device.cupy.asarray(rounded).view(dtype_of(storage))


def random_on_gpu(device, *shape, storage: str = "bfloat16"):
    """Return normally distributed values on the GPU. (Products of zeros are up to 13% faster.)"""
    size = int(np.prod(shape))
    block = on_gpu(device, np.random.default_rng(4).standard_normal(min(size, RANDOM_VALUES), np.float32), storage)
    array = device.empty((size,), block.dtype)
    for start in range(0, size, len(block)):  # copy one block: gigabytes of random numbers would take seconds
        part = array[start : start + len(block)]
        part[:] = block[: len(part)]
    return array.reshape(shape)


def copy_rate(device, count: int) -> float:
    """Return the best rate of several copies of `count` bytes within the GPU: bytes read and written per second."""
    one = device.empty((count,), np.uint8)
    two = device.empty((count,), np.uint8)
    ms = _best_ms(device, lambda: two.data.copy_from_device_async(one.data, count, device.stream))
    return 2 * count / ms * 1e3


def matmul_rates(device, size: int, storage: str, seconds: float) -> dict[str, float]:
    """Return FLOP/s of the product of two (size, size) matrices with the best of cuBLASLt's algorithms.

    "matmul_burst_flops": the fastest of a few products. "matmul_flops": the mean over the second half of `seconds` of
    products. By then the clock has fallen to what the power limit allows, as in a training run.
    """
    left, right = (random_on_gpu(device, size, size, storage=storage) for _ in range(2))
    out = device.empty((size, size), left.dtype)

    def run():
        device.matmul(out, left, right)

    burst_ms = _best_ms(device, run)
    events = [device.new_event() for _ in range(3)]
    events[0].record(device.stream)
    half = math.ceil(seconds / 2 * 1e3 / burst_ms)
    for event in events[1:]:
        for _ in range(half):
            run()
        event.record(device.stream)
    device.synchronize()
    ms = device.elapsed_ms(*events[1:]) / half
    return {"matmul_flops": 2 * size**3 / ms * 1e3, "matmul_burst_flops": 2 * size**3 / burst_ms * 1e3}


def _best_ms(device, run) -> float:
    run()  # chooses the algorithm
    return min(device.time_ms(run) for _ in range(RATE_REPEATS))
