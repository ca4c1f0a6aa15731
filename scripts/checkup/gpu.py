"""Facts about a node's GPUs, as the driver's tool lists them, and about the one that this rank would compute on."""

import os
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from dist.probe.tool_output import tool_output
from scripts.checkup.facts import error_text, is_first_on_node, variables

COLUMNS = ("index", "name", "driver_version", "memory.total", "memory.used")
QUERY = ("nvidia-smi", f"--query-gpu={','.join(COLUMNS)}", "--format=csv,noheader,nounits")
MIB = 1 << 20


def sections() -> dict:
    """Before MPI starts: a process that has started it should start no other."""
    return {"GPUs": gpus}


def rank_sections(local_rank: int) -> dict:
    """Once the ranks know their nodes."""
    return {"own GPU": partial(own, local_rank), "GPU-aware MPI": gpu_aware}


def gpus() -> dict:
    """The node's GPUs, on its first rank: `listed` by nvidia-smi, how they are linked, the driver, what is visible."""
    first = is_first_on_node(os.environ)
    listed = parse_list(tool_output(*QUERY) or "") if first else []
    driver = listed[0]["driver"] if listed else _kernel_driver()
    return {
        "listed": listed,
        "topology": _topology() if listed else None,
        "driver": driver,
        "variables": variables("CUDA_VISIBLE_DEVICES"),
        "libraries": _libraries() if driver else {},
    }


def parse_list(text: str) -> list[dict]:
    """nvidia-smi's lines as [{"index", "name", "driver", "total", "used"}], bytes; a line of another form is left out.

    The parts of a GPU that say [N/A] or [Insufficient Permissions] are None.
    """
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [
        {"index": int(row[0]), "name": row[1], "driver": row[2], "total": _bytes(row[3]), "used": _bytes(row[4])}
        for row in rows
        if len(row) == len(COLUMNS) and row[0].isdigit()
    ]


def own(local_rank: int) -> dict:
    """What CuPy sees; `problem` where it cannot compute. index, name, id: of the GPU that training would choose."""
    from gpt2.errors import UserError
    from gpt2.kernels.cupy.device import import_cupy

    try:
        cupy = import_cupy()
    except UserError as error:
        return {"cupy": None, "count": 0, "problem": str(error)}
    runtime = cupy.cuda.runtime
    facts = {"cupy": cupy.__version__, "runtime_cuda": runtime.runtimeGetVersion(), "count": 0, "problem": None}
    try:
        facts["driver_cuda"] = runtime.driverGetVersion()
        facts["count"] = runtime.getDeviceCount()
        return facts | (_chosen(local_rank, cupy) if facts["count"] else {})
    except runtime.CUDARuntimeError as error:
        return facts | {"problem": error_text(error)}


def _chosen(local_rank: int, cupy) -> dict:
    from dist.gpu.nccl import missing_nccl
    from scripts.backends.gpus import gpu_identity, own_gpu

    index = own_gpu(local_rank)
    with cupy.cuda.Device(index):
        free, total = cupy.cuda.runtime.memGetInfo()
    missing = missing_nccl()
    return {
        "index": index,
        **gpu_identity(index),
        "capability": int(cupy.cuda.Device(index).compute_capability),
        "free": free,
        "total": total,
        "nccl": None if missing else cupy.cuda.nccl.get_version(),
        "nccl_missing": missing,
        "cudnn": _cudnn(),
    }


def _cudnn() -> int | None:
    """Its version as cuDNN counts, 91002 for 9.10.2; None without it or its frontend."""
    try:
        import cudnn

        return cudnn.backend_version()
    except Exception:  # its import fails in several ways where the library under it is not found
        return None


def gpu_aware() -> dict:
    """What the MPI library says of itself; after MPI's start."""
    from dist.gpu.gpu_aware import says_gpu_aware

    aware, why = says_gpu_aware()
    return {"aware": aware, "why": why}


def _topology() -> dict | None:
    from dist.gpu.topology import gpu_topology

    return gpu_topology()


def _kernel_driver() -> str | None:
    """The driver's version where nvidia-smi is not to be had."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
    except OSError:
        return None
    return next((word for word in words if word[:1].isdigit() and "." in word), None)


def _libraries() -> dict[str, str]:
    """What is installed of the packages that computing on a GPU may use."""
    from scripts.machine.gpu import PACKAGES

    found = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _bytes(mebibytes: str) -> int | None:
    return int(mebibytes) * MIB if mebibytes.isdigit() else None
