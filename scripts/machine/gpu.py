"""Describe the measured GPU: name, software, datasheet rate."""

import ctypes

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
