"""A `device` for gpt2/kernels/cupy/launch.py that is a CPU: the .cu files through g++ and cuda_cpu.h."""

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest

from gpt2.kernels.cupy.compile import FOLDER, STORAGES
from gpt2.kernels.cupy.launch import storage as storage_of
from tests.gpu.cuda_shim.fake_cublaslt import gelu, gelu_slope
from tests.gpu.cuda_shim.memory import to_bfloat16, widen

SHIM = Path(__file__).parent
# Kernels read float arrays as packs, as CUDA allows; the jumps from fiber to fiber are no smashed stacks.
FLAGS = ("-std=c++17", "-O2", "-shared", "-fPIC", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE")
OUTCOMES = {
    1: "deadlock: a barrier or shuffle that not all threads reach",
    2: "a misaligned access",
    3: "an overrun of dynamic shared memory",
}
# Threads of a block, blocks of a multiprocessor where that is asked for, the kernel's name.
KERNEL = re.compile(r'extern "C" __global__ void __launch_bounds__\((\d+)(?:, (\d+))?\)\s*(\w+)\(')

LAUNCHER = """
extern "C" int launch_NAME(
    const unsigned* sizes, size_t shared_bytes, uint64_t seed, const char* left_out, void** arguments) {
    return cpu::launch(sizes, shared_bytes, seed, left_out, arguments, [](void** a) { cpu::call(NAME, a); });
}
"""


class Shim:
    """Kernels from `folder`'s .cu files, built in `build`, once; `seed` decides in which order threads and blocks run.

    left_out: "/file:line" of a barrier that no thread waits at. Arrays are NumPy's, bfloat16 being uint16. Matrix
    products are NumPy's too; fused: with the work of epilogues in them.
    """

    cudnn_attention = spare = left_out = None
    multiprocessors, multiprocessor_bytes = 1, 228 << 10

    def __init__(self, build: Path, folder: Path = FOLDER, fused: bool = False):
        self.build, self.folder, self.seed, self.fused = build, folder, 0, fused
        self._libraries, self._largest_block = {}, {}

    def launch(self, source, storage, kernel, grid, block, arguments, shared_bytes=0):
        """Run one kernel to its end. RuntimeError: it cannot end, or a block is larger than its launch bounds."""
        library = self._library(source, storage)
        sizes = (*grid, *(1,) * (3 - len(grid)), *block, *(1,) * (3 - len(block)))
        if np.prod(block) > self._largest_block[kernel] or np.prod(block) % 32:
            raise RuntimeError(f"{kernel}: block {block}, expected whole warps within its launch bounds")
        values = [_argument(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        outcome = getattr(library, f"launch_{kernel}")(
            (ctypes.c_uint * 6)(*sizes), ctypes.c_size_t(shared_bytes), ctypes.c_uint64(self.seed),
            self.left_out and ctypes.c_char_p(self.left_out.encode()), pointers,
        )  # fmt: skip
        if outcome:
            raise RuntimeError(f"{kernel}, seed {self.seed}: {OUTCOMES[outcome]}")

    def scratch(self, name, shape, dtype):
        """An array of NaNs: what is read must have been written."""
        array = np.empty(shape, dtype)
        array.view(np.uint8).fill(0xFF)
        return array

    def empty(self, shape, dtype):
        return np.zeros(shape, dtype)

    def upload(self, name, array):
        return np.array(array, np.int32)

    def constant(self, array):
        return array.copy()

    def download(self, array):
        return array.copy()

    def faster_of(self, work, out, theirs, ours, repeatable=True):
        return theirs() if self.fused else ours()

    def matmul(
        self, out, left, right, *, bias=None, gelu_input=None, dgelu_input=None, left_sums=None, accumulate=False
    ):
        product = widen(left) @ widen(right)
        if bias is not None:
            product += widen(bias)
        if gelu_input is not None:
            _round(gelu_input, product)
            product = gelu(product)
        if dgelu_input is not None:
            product *= gelu_slope(widen(dgelu_input))
        if left_sums is not None:
            _round(left_sums, widen(left).sum(1))
        _round(out, product + widen(out) if accumulate else product)

    def _library(self, source, storage):
        if (source, storage) not in self._libraries:
            self._libraries[source, storage] = self._build(source, storage)
        return self._libraries[source, storage]

    def _build(self, source, storage):
        path = self.folder / f"{source}.cu"
        kernels = {name: int(threads) for threads, _, name in KERNEL.findall(path.read_text())}
        self._largest_block.update(kernels)
        unit, library = (self.build / f"{source}-{storage}.{suffix}" for suffix in ("cpp", "so"))
        if library.exists():  # another test has built it
            return ctypes.CDLL(str(library))
        lines = ('#include "cuda_cpu.h"', f'#include "{path}"', *(LAUNCHER.replace("NAME", name) for name in kernels))
        unit, part = (file.with_suffix(f".{os.getpid()}{file.suffix}") for file in (unit, library))  # ranks build, too
        unit.write_text("\n".join(lines))
        includes = (f"-I{SHIM}", f"-I{self.folder}")
        subprocess.run(["g++", *FLAGS, *STORAGES[storage], *includes, "-o", str(part), str(unit)], check=True)
        part.replace(library)
        return ctypes.CDLL(str(library))


def lasting_build() -> Path:
    """A folder for what all tests build, in any process: one for each state of the sources, found again next time.

    Skips the test on a machine without g++.
    """
    if shutil.which("g++") is None:
        pytest.skip("the CPU shim needs g++")
    sources = sorted([*FOLDER.glob("*.cu*"), *SHIM.glob("*.h"), Path(__file__)])
    key = hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"cuda_shim-{os.getuid()}-{key}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _round(out, values):
    out[...] = to_bfloat16(values) if storage_of(out) == "bfloat16" else values


def _argument(argument):
    """The ctypes value of a kernel argument: an array's address, null for None, or the NumPy scalar itself."""
    if argument is None:
        return ctypes.c_void_p()
    if isinstance(argument, np.ndarray):
        return ctypes.c_void_p(argument.ctypes.data)
    return np.ctypeslib.as_ctypes_type(argument.dtype)(argument.item())
