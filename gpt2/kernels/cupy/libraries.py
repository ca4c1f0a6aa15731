"""NVIDIA's libraries and headers, from its Python wheels or else from the machine's CUDA toolkit.

cuda-pathfinder, which comes with CuPy, finds the toolkit: it knows conda, CUDA_HOME and the loader's paths.
"""

import ctypes
import importlib.util
from pathlib import Path

from gpt2.errors import UserError


def find_in_wheels(pattern: str) -> Path | None:
    """Return the matching file of the newest of NVIDIA's installed wheels, or None.

    CUDA 13's wheels install into nvidia/cu13, CUDA 12's into a folder for each library.
    """
    spec = importlib.util.find_spec("nvidia")
    roots = [] if spec is None else spec.submodule_search_locations
    found = [file for root in roots for file in Path(root).glob(f"*/{pattern}")]
    return max(found, key=lambda file: (file.parts[-3].startswith("cu1"), file), default=None)


def open_library(name: str) -> ctypes.CDLL:
    """Open NVIDIA's library of that name, such as nvrtc or cublasLt. UserError: there is none."""
    path = find_in_wheels(f"lib/lib{name}.so.*")
    if path is not None:
        return ctypes.CDLL(str(path))
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        return ctypes.CDLL(load_nvidia_dynamic_lib(name).abs_path)
    except Exception as error:  # not installed, or one of its own errors
        reason = str(error).splitlines()[0]
        raise UserError(
            f"no library {name} ({reason}), expected a CUDA toolkit: load the site's, or pip install nvidia-cublas "
            "and gpt2-mpi[nvrtc]"
        ) from None


def header_folder() -> Path:
    """Return the folder of cuda_bf16.h. UserError: there is none."""
    path = find_in_wheels("include/cuda_bf16.h")
    if path is not None:
        return path.parent
    try:
        from cuda.pathfinder import find_nvidia_header_directory

        return Path(find_nvidia_header_directory("cudart"))
    except Exception:  # not installed, or nothing found
        raise UserError("no cuda_bf16.h, expected CUDA's headers: pip install gpt2-mpi[nvrtc]") from None
