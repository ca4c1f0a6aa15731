"""A node's GPUs, as the driver lists them, and the one that a rank would compute on; whether they fit the ranks."""

from contextlib import suppress
from functools import partial

from dist.probe.programs import LOCAL_RANKS, is_first, tool_output
from scripts.checkup.facts import error_text, variables
from scripts.checkup.findings import FAIL, NOTE, SLOW, Finding, Ranks, bytes_text, fact

QUERY = "nvidia-smi --query-gpu=name,driver_version --format=csv,noheader"
USED_PART = 0.1


def gpus() -> dict:
    """Return the node's GPUs, on its first rank: `listed` by nvidia-smi, the driver, and what is visible.

    Before MPI starts: a process that has started it should start no other.
    """
    lines = (tool_output(*QUERY.split()) or "").splitlines() if is_first(LOCAL_RANKS) else []
    listed = [dict(zip(("name", "driver"), line.split(", "), strict=True)) for line in lines if line.count(", ") == 1]
    driver = listed[0]["driver"] if listed else None
    return {"listed": listed, "driver": driver, "variables": variables("CUDA_VISIBLE_DEVICES")}


def own_gpu(local_rank: int) -> dict:
    """Say what CuPy sees; `problem` where it cannot compute. index, name, id: of the GPU that training would choose."""
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

    index = own_gpu(local_rank)
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
        "free": free,
        "total": total,
        "nccl_missing": missing_nccl(),
        "cudnn": cudnn_version,
    }


def gpu_aware() -> dict:
    """Return what the MPI library says of itself; after MPI's start."""
    from dist.gpu.gpu_aware import says_gpu_aware

    return dict(zip(("aware", "why"), says_gpu_aware(), strict=True))


SECTIONS = {"GPUs": gpus}


def rank_sections(local_rank: int) -> dict:
    """Return the sections that need to know the ranks' nodes."""
    return {"own GPU": partial(own_gpu, local_rank), "GPU-aware MPI": gpu_aware}


def unused(ranks, model):
    """Find GPUs that the driver lists and CuPy does not compute on."""
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
    """Say whether there is a driver (its version is 0 else), and its CUDA's major version is below the libraries'."""
    return 0 < own.get("driver_cuda", 0) // 1000 < _libraries_cuda(own)


def _libraries_cuda(own: dict) -> int:
    """Return the major version of the newest CUDA that CuPy or cuBLASLt is made for."""
    return max(own["runtime_cuda"] // 1000, own.get("cublaslt", 0) // 10000)


def occupied(ranks, model):
    """Find a GPU of several ranks, and one that computes for others already."""
    for members in ranks.nodes:
        for some in (some for some in members.holders("own GPU/id").values() if len(some) > 1):
            text = f"ranks {some.numbers} have one GPU on {some.hosts}"
            fix = "start as many ranks a node as it has GPUs (srun --ntasks-per-node, --gpus-per-task=1), "
            yield Finding(FAIL, "GPU", text, f"{fix}or --share-gpus")
    if used := ranks.where("own GPU", lambda own: _used(own) > USED_PART * own.get("total", 0)):
        text = f"{bytes_text(max(map(_used, used.values('own GPU'))))} of the GPU of {used.names} are in use "
        yield Finding(SLOW, "GPU", f"{text}before training begins", "see who computes there: nvidia-smi")


def _used(own: dict) -> int:
    """Return the bytes in use."""
    return own.get("total", 0) - own.get("free", 0)


def libraries(ranks, model):
    """Find a driver that is too old, and a missing NCCL or cuDNN."""
    if old := ranks.where("own GPU", _is_older):
        driver, newest = old[0]["own GPU"]["driver_cuda"] // 1000, _libraries_cuda(old[0]["own GPU"])
        text = f"the driver on {old.hosts} is of CUDA {driver}, and CuPy or cuBLAS of CUDA {newest}: they do not run"
        fix = f"pip install -e '.[gpu-cuda{driver}]' in place of those, or a newer driver"
        yield Finding(FAIL, "GPU", text, fix)
    having = ranks.where("own GPU/id")
    without = having.where("own GPU/nccl_missing")
    if len(having) > 1 and without and len(having.where("GPU-aware MPI/aware", bool)) < len(having):
        text = f"no NCCL on {without.hosts} ({without[0]['own GPU']['nccl_missing']}), and MPI is not GPU-aware"
        fix = "pip install nvidia-nccl-cu13 (cu12); without it exchanges go through host memory"
        yield Finding(SLOW, "GPU", text, fix)
    if lacking := having.where("own GPU", lambda own: own["cudnn"] is None):
        from gpt2.kernels.cupy.cudnn_attention import INSTALL

        text = f"no cuDNN frontend on {lacking.hosts}: attention in bfloat16 by our own kernels, which are slower"
        yield Finding(NOTE, "GPU", text, INSTALL)


def slowed(ranks, model):
    """Find a power limit or a clock below the card's default."""
    for what, name, unit, fix in (
        ("power limit", "power_w", "W", "nvidia-smi -pl {}, as root"),
        ("clock", "clock_mhz", "MHz", "nvidia-smi -rac, as root"),
    ):
        if low := ranks.where("own GPU", lambda own, name=name: 0 < own.get(name, 0) < own.get(f"default_{name}", 0)):
            own = low[0]["own GPU"]
            usual = own[f"default_{name}"]
            text = f"the {what} of the GPU of {low.names} is {own[name]} {unit}, by default {usual}"
            yield Finding(SLOW, "GPU", text, f"{fix.format(usual)}, or ask the site why")


CHECKS = (unused, occupied, libraries, slowed)
