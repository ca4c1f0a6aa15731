"""Compile the .cu files here to machine code with NVRTC, without a GPU, driver or CuPy.

`cupy.cuda.function.Module.load` loads the result, also for sm_90a; CuPy's own RawModule would compile for plain sm_90.
NVRTC and the CUDA headers come from `pip install gpt2-mpi[nvrtc]` or the machine's CUDA toolkit.
"""

import ctypes
import hashlib
from pathlib import Path

from gpt2.files import replacing
from gpt2.kernels.cupy.libraries import find_in_wheels, header_folder, open_library

FOLDER = Path(__file__).parent
SOURCES = tuple(sorted(path.stem for path in FOLDER.glob("*.cu")))
STORAGES = {"float32": (), "bfloat16": ("-DBFLOAT16",)}  # {how values are stored: compiler options}

# Denormals count as zero: this makes exp and divisions faster, and no value here is below 1e-38.
OPTIONS = ("--std=c++17", "-ftz=true", "--ptxas-options=-v", f"-I{FOLDER}")


def compile_cubin(source: str, storage: str, arch: str) -> tuple[bytes, str]:
    """Compile `source` (one of SOURCES) for values stored as float32 or bfloat16, for sm_80, sm_90a or another GPU.

    Returns the machine code (an ELF file) and the log, with each kernel's resources (ptxas -v). UserError: NVRTC is not
    installed. RuntimeError: it refuses the source; the text is the compiler's log.
    """
    path = FOLDER / f"{source}.cu"
    options = (*OPTIONS, *STORAGES[storage], f"-arch={arch}", f"-I{header_folder()}")
    nvrtc = _open_nvrtc()
    program = ctypes.c_void_p()
    _check(nvrtc, nvrtc.nvrtcCreateProgram(ctypes.byref(program), path.read_bytes(), path.name.encode(), 0, None, None))
    try:
        arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = nvrtc.nvrtcCompileProgram(program, len(options), arguments)
        log = _output(nvrtc, program, "ProgramLog").decode().rstrip("\0")
        if status:
            raise RuntimeError(f"{path.name} for {storage}, {arch}: NVRTC status {status}\n{log}")
        return _output(nvrtc, program, "CUBIN"), log
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def cached_code(source: str, storage: str, arch: str, cache: Path | None) -> bytes:
    """Return compile_cubin's machine code, from the cache folder if these sources were compiled before."""
    if cache is None:
        return compile_cubin(source, storage, arch)[0]
    path = _cached_file(source, storage, arch, cache)
    if not path.exists():
        keep_code(compile_cubin(source, storage, arch)[0], source, storage, arch, cache)
    return path.read_bytes()


def keep_code(code: bytes, source: str, storage: str, arch: str, cache: Path) -> None:
    """Store code for cached_code. Ranks may call this at once: the file appears complete or not at all."""
    cache.mkdir(parents=True, exist_ok=True)
    with replacing(_cached_file(source, storage, arch, cache)) as file:
        file.write(code)


def _cached_file(source: str, storage: str, arch: str, cache: Path) -> Path:
    texts = [path.read_bytes() for path in (FOLDER / f"{source}.cu", *sorted(FOLDER.glob("*.cuh")))]
    key = hashlib.sha256(b"\0".join([*texts, repr((OPTIONS, nvrtc_version())).encode()])).hexdigest()[:16]
    return cache / f"{source}-{storage}-{arch}-{key}.cubin"


def nvrtc_version() -> tuple[int, int]:
    nvrtc = _open_nvrtc()
    major = ctypes.c_int()
    minor = ctypes.c_int()
    _check(nvrtc, nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


def _open_nvrtc():
    builtins = find_in_wheels("lib/libnvrtc-builtins.so.*")
    if builtins is not None:
        ctypes.CDLL(str(builtins))  # NVRTC opens it by name, which works once it is loaded
    return open_library("nvrtc")


def _output(nvrtc, program, what: str) -> bytes:
    """Return the output of nvrtcGet<what>, whose size nvrtcGet<what>Size returns."""
    size = ctypes.c_size_t()
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}")(program, buffer))
    return buffer.raw


def _check(nvrtc, status: int) -> None:
    if status:
        nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(f"NVRTC: {nvrtc.nvrtcGetErrorString(status).decode()}")
