"""A node's GPUs, as the driver lists them, and the one that a rank would compute on; whether they fit the ranks."""

import re
from contextlib import suppress
from functools import partial
from pathlib import Path

from dist.control_groups import text_of
from dist.gpu.topology import gpu_topology
from dist.probe.programs import LOCAL_RANKS, is_first, tool_output
from scripts.checkup.facts import error_text, installed, variables
from scripts.checkup.findings import FAIL, NOTE, SLOW, Finding, Ranks, bytes_text, fact, plural

QUERY = "nvidia-smi --query-gpu=name,driver_version --format=csv,noheader"
USED_PART = 0.1


def gpus() -> dict:
    """The node's GPUs, on its first rank: `listed` by nvidia-smi, how they are linked, the driver, what is visible.

    Before MPI starts: a process that has started it should start no other.
    """
    lines = (tool_output(*QUERY.split()) or "").splitlines() if is_first(LOCAL_RANKS) else []
    listed = [dict(zip(("name", "driver"), line.split(", "), strict=True)) for line in lines if line.count(", ") == 1]
    kernel = re.search(r"\b\d+\.\S+", text_of(Path("/proc/driver/nvidia/version")))
    driver = listed[0]["driver"] if listed else kernel and kernel[0]
    libraries = {}
    if driver:
        from scripts.machine.gpu import PACKAGES  # needs NumPy

        libraries = {name: version for name in PACKAGES if (version := installed(name))}
    return {
        "listed": listed,
        "topology": gpu_topology() if listed else None,
        "driver": driver,
        "variables": variables("CUDA_VISIBLE_DEVICES"),
        "libraries": libraries,
    }


def own_gpu(local_rank: int) -> dict:
    """What CuPy sees; `problem` where it cannot compute. index, name, id: of the GPU that training would choose."""
    from gpt2.errors import UserError
    from gpt2.kernels.cupy.cublaslt import CublasLt
    from gpt2.kernels.cupy.device import import_cupy

    try:
        cupy = import_cupy()
    except UserError as error:
        return {"cupy": None, "count": 0, "problem": str(error)}
    runtime = cupy.cuda.runtime
    facts = {"cupy": cupy.__version__, "runtime_cuda": runtime.runtimeGetVersion(), "count": 0, "problem": None}
    with suppress(UserError):
        facts["cublaslt"] = CublasLt().version  # 130100 for CUDA 13
    try:
        facts["driver_cuda"] = runtime.driverGetVersion()
        facts["count"] = runtime.getDeviceCount()
        return facts | (_chosen(local_rank, cupy) if facts["count"] else {})
    except runtime.CUDARuntimeError as error:
        return facts | {"problem": error_text(error)}


def _chosen(local_rank: int, cupy) -> dict:
    from dist.gpu.nccl import missing_nccl
    from scripts.backends.gpus import gpu_identity, own_gpu

    index, missing = own_gpu(local_rank), missing_nccl()
    with cupy.cuda.Device(index):
        free, total = cupy.cuda.runtime.memGetInfo()
    try:
        import cudnn

        cudnn_version = cudnn.backend_version()  # 91002 for 9.10.2
    except Exception:  # its import fails in several ways where the library under it is not found
        cudnn_version = None
    return {
        "index": index,
        **gpu_identity(index),
        "capability": int(cupy.cuda.Device(index).compute_capability),
        "free": free,
        "total": total,
        "nccl": None if missing else cupy.cuda.nccl.get_version(),
        "nccl_missing": missing,
        "cudnn": cudnn_version,
    }


def gpu_aware() -> dict:
    """What the MPI library says of itself; after MPI's start."""
    from dist.gpu.gpu_aware import says_gpu_aware

    return dict(zip(("aware", "why"), says_gpu_aware(), strict=True))


SECTIONS = {"GPUs": gpus}


def rank_sections(local_rank: int) -> dict:
    """Once the ranks know their nodes."""
    return {"own GPU": partial(own_gpu, local_rank), "GPU-aware MPI": gpu_aware}


def unused(ranks, model):
    """GPUs that the driver lists and CuPy does not compute on."""
    idle = Ranks()
    for members in ranks.nodes:
        if fact(members[0], "GPUs/listed"):
            idle += members.where("own GPU", lambda own: own["count"] == 0 and not _is_older(own))
    for some in idle.holders("own GPU").values():
        own, shown = some[0]["own GPU"], some.values("GPUs/variables/CUDA_VISIBLE_DEVICES")
        text = f"{some.hosts} has GPUs, and CuPy finds none: {own['problem'] or 'none is visible'}"
        fix = "pip install -e '.[gpu-cuda13]' (gpu-cuda12 for a driver of CUDA 12)"
        if own["cupy"]:
            hidden = f"CUDA_VISIBLE_DEVICES is {shown[0]!r}: " if shown else ""
            fix = f"{hidden}ask for GPUs (srun --gpus-per-task=1, or --gres=gpu:N), and check nvidia-smi there"
        yield Finding(FAIL if own["cupy"] else SLOW, "GPU", text, fix)


def _is_older(own: dict) -> bool:
    """Whether there is a driver (its version is 0 else), and its CUDA's major version is below the libraries'."""
    return 0 < own.get("driver_cuda", 0) // 1000 < _libraries_cuda(own)


def _libraries_cuda(own: dict) -> int:
    """The newest CUDA that CuPy or cuBLASLt is made for: its major version."""
    return max(own["runtime_cuda"] // 1000, own.get("cublaslt", 0) // 10000)


def shared(ranks, model):
    """A GPU of several ranks, and GPUs of none."""
    idle = Ranks()
    for members in ranks.nodes:
        sharers, listed = members.holders("own GPU/id"), fact(members[0], "GPUs/listed") or []
        for some in (some for some in sharers.values() if len(some) > 1):
            text = f"ranks {some.numbers} have one GPU on {some.hosts}"
            fix = "start as many ranks a node as it has GPUs (srun --ntasks-per-node, --gpus-per-task=1), "
            yield Finding(FAIL, "GPU", text, f"{fix}or --share-gpus")
        if 0 < len(sharers) < len(listed) and len(members.where("own GPU")) == len(members):
            idle.append(members[0] | {"taken": len(sharers)})
    if idle:
        count = len(idle[0]["GPUs"]["listed"])
        text = f"{idle[0]['taken']} of {plural(count, 'GPU')} on {idle.hosts} have a rank"
        yield Finding(NOTE, "GPU", text, f"start {count} ranks a node to use all")


def unfit(ranks, model):
    """A driver or a GPU that is too old, or a GPU that is busy."""
    from gpt2.kernels.cupy.device import OLDEST_CAPABILITY

    if old := ranks.where("own GPU", _is_older):
        driver, newest = old[0]["own GPU"]["driver_cuda"] // 1000, _libraries_cuda(old[0]["own GPU"])
        text = f"the driver on {old.hosts} is of CUDA {driver}, and CuPy or cuBLAS of CUDA {newest}: they do not run"
        fix = f"pip install -e '.[gpu-cuda{driver}]' in place of those, or a newer driver"
        yield Finding(FAIL, "GPU", text, fix)
    if old := ranks.where("own GPU/capability", lambda capability: capability < OLDEST_CAPABILITY):
        name = old[0]["own GPU"]["name"]
        text = f"the GPU of {old.names} is a {name}: bfloat16 and asynchronous copies came later"
        yield Finding(FAIL, "GPU", text, "use GPUs from Ampere on (A100), or --backend numpy")
    if used := ranks.where("own GPU", lambda own: _used(own) > USED_PART * own.get("total", 0)):
        text = f"{bytes_text(max(map(_used, used.values('own GPU'))))} of the GPU of {used.names} are in use "
        yield Finding(SLOW, "GPU", f"{text}before training begins", "see who computes there: nvidia-smi")


def _used(own: dict) -> int:
    """Bytes."""
    return own.get("total", 0) - own.get("free", 0)


def between(ranks, model):
    """GPUs that no fast way links, or that differ."""
    having = ranks.where("own GPU/id")
    without = having.where("own GPU/nccl_missing")
    if len(having) > 1 and without and len(having.where("GPU-aware MPI/aware", bool)) < len(having):
        text = f"no NCCL on {without.hosts} ({without[0]['own GPU']['nccl_missing']}), and MPI is not GPU-aware"
        fix = "pip install nvidia-nccl-cu13 (cu12); without it exchanges go through host memory"
        yield Finding(SLOW, "GPU", text, fix)
    for name, path in (("the driver", "GPUs/driver"), ("the GPU", "own GPU/name")):
        if text := ranks.difference(path):
            fix = "ask for one kind of node (SLURM: --constraint); steps go at the slowest GPU's pace"
            yield Finding(NOTE, "GPU", f"{name} differs between nodes: {text}", fix)


def slowed(ranks, model):
    """A power limit or a clock below the card's default, and a missing cuDNN."""
    for what, name, unit, fix in (
        ("power limit", "power_w", "W", "nvidia-smi -pl {}, as root"),
        ("clock", "clock_mhz", "MHz", "nvidia-smi -rac, as root"),
    ):
        if low := ranks.where("own GPU", lambda own, name=name: 0 < own.get(name, 0) < own.get(f"default_{name}", 0)):
            own = low[0]["own GPU"]
            usual = own[f"default_{name}"]
            text = f"the {what} of the GPU of {low.names} is {own[name]} {unit}, by default {usual}"
            yield Finding(SLOW, "GPU", text, f"{fix.format(usual)}, or ask the site why")
    if lacking := ranks.where("own GPU", lambda own: own.get("cudnn", 0) is None):
        from gpt2.kernels.cupy.cudnn_attention import INSTALL

        text = f"no cuDNN frontend on {lacking.hosts}: attention in bfloat16 by our own kernels, which are slower"
        yield Finding(NOTE, "GPU", text, INSTALL)


CHECKS = (unused, shared, unfit, between, slowed)
