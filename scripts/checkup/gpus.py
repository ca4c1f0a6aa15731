"""Check the GPUs that the driver lists on a node, and the GPU that each rank would use."""

from dist.probe.programs import LOCAL_RANKS, is_first, tool_output
from scripts.checkup.facts import RankFacts, fact, variables
from scripts.checkup.report import FAIL, NOTE, SLOW, Problem, bytes_text
from scripts.machine.names import error_text, rank_numbers

QUERY = "nvidia-smi --query-gpu=name,driver_version --format=csv,noheader"
USUALLY_FREE = 0.9  # this share of a GPU's memory, before training begins


def gpus() -> dict:
    """Return the GPUs that nvidia-smi lists, the driver (both on a node's first rank), and which GPUs are visible.

    Call it before MPI starts, because it starts a process.
    """
    lines = (tool_output(*QUERY.split()) or "").splitlines() if is_first(LOCAL_RANKS) else []
    listed = [dict(zip(("name", "driver"), line.split(", "), strict=True)) for line in lines if line.count(", ") == 1]
    driver = listed[0]["driver"] if listed else None
    return {"listed": listed, "driver": driver, "variables": variables("CUDA_VISIBLE_DEVICES")}


def own_gpu(local_rank: int) -> dict:
    """Describe this rank's GPU through CuPy, with `problem` if CuPy cannot compute. Call it after MPI has started."""
    from gpt2.errors import UserError
    from gpt2.kernels.cupy.cublaslt import CublasLt
    from gpt2.kernels.cupy.device import import_cupy

    try:
        cupy = import_cupy()
    except UserError as error:
        return {"cupy": None, "count": 0, "problem": str(error)}
    runtime = cupy.cuda.runtime
    facts = {"cupy": cupy.__version__, "runtime_cuda": runtime.runtimeGetVersion(), "count": 0, "problem": None}
    try:
        facts["cublaslt"] = CublasLt().version  # 130100 for CUDA 13
    except UserError:
        facts["cublaslt"] = 0
    try:
        facts["driver_cuda"] = runtime.driverGetVersion()
        facts["count"] = runtime.getDeviceCount()
        return facts | (_chosen(local_rank, cupy) if facts["count"] else {})
    except runtime.CUDARuntimeError as error:
        return facts | {"problem": error_text(error)}


def _chosen(local_rank: int, cupy) -> dict:
    from dist.gpu.gpu_aware import says_gpu_aware
    from dist.gpu.nccl import missing_nccl
    from scripts.backends.gpus import gpu_identity, own_gpu

    index = own_gpu(local_rank)
    with cupy.cuda.Device(index):
        free, total = cupy.cuda.runtime.memGetInfo()
    try:
        import cudnn

        cudnn_version = cudnn.backend_version()  # 91002 for 9.10.2
    except Exception:  # without its library, the import fails in several ways
        cudnn_version = None
    facts = {"index": index, **gpu_identity(index), "free": free, "total": total, "cudnn": cudnn_version}
    return facts | {"nccl_missing": missing_nccl(), "mpi_is_gpu_aware": says_gpu_aware()[0]}


SECTIONS = {"GPUs": gpus}


def unused(ranks, model):
    """Find nodes whose driver lists GPUs of which CuPy sees none."""
    idle = RankFacts()
    for members in ranks.nodes:
        if fact(members[0], "GPUs/listed"):
            idle += members.where("own GPU", lambda own: own["count"] == 0 and not _is_older(own))
    for some in idle.by_value("own GPU").values():
        own = some[0]["own GPU"]
        text = f"{some.hosts} has GPUs, and CuPy finds none: {own['problem'] or 'none is visible'}"
        if own["cupy"]:
            shown = some.values("GPUs/variables/CUDA_VISIBLE_DEVICES")
            fix = f"CUDA_VISIBLE_DEVICES is {shown[0]!r}: " if shown else ""
            fix += "ask for GPUs (srun --gpus-per-task=1, or --gres=gpu:N), and check nvidia-smi there"
            yield Problem(FAIL, "GPU", text, fix)
        else:
            yield Problem(SLOW, "GPU", text, "pip install -e '.[gpu-cuda13]' (gpu-cuda12 for a driver of CUDA 12)")


def _is_older(own: dict) -> bool:
    """Return whether the driver supports only older CUDA versions than the libraries need; False without a driver."""
    return 0 < own.get("driver_cuda", 0) // 1000 < _libraries_cuda(own)


def _libraries_cuda(own: dict) -> int:
    """Return the newest major version of CUDA that CuPy or cuBLASLt needs."""
    return max(own["runtime_cuda"] // 1000, own.get("cublaslt", 0) // 10000)


def occupied(ranks, model):
    """Find GPUs that several ranks share, and GPUs that other processes use."""
    for members in ranks.nodes:
        for some in members.by_value("own GPU/id").values():
            if len(some) > 1:
                text = f"ranks {rank_numbers(some.values('place/rank'))} share one GPU on {some.hosts}"
                fix = "start as many ranks per node as it has GPUs (srun --ntasks-per-node, --gpus-per-task=1), "
                yield Problem(FAIL, "GPU", text, f"{fix}or --share-gpus")
    if used := ranks.where("own GPU/total").where("own GPU", lambda own: own["free"] < USUALLY_FREE * own["total"]):
        most = max(own["total"] - own["free"] for own in used.values("own GPU"))
        text = f"{bytes_text(most)} of the GPU of {used.names} are in use before training begins"
        yield Problem(SLOW, "GPU", text, "find out which processes use it: nvidia-smi")


def libraries(ranks, model):
    """Find a driver that is too old, and missing NCCL or cuDNN."""
    if old := ranks.where("own GPU", _is_older):
        driver = old[0]["own GPU"]["driver_cuda"] // 1000
        newest = _libraries_cuda(old[0]["own GPU"])
        text = f"the driver on {old.hosts} is for CUDA {driver}, CuPy or cuBLAS for CUDA {newest}: they will fail"
        yield Problem(FAIL, "GPU", text, f"pip install -e '.[gpu-cuda{driver}]' instead, or install a newer driver")
    having = ranks.where("own GPU/id")
    without = having.where("own GPU/nccl_missing")
    if len(having) > 1 and without and not all(having.values("own GPU/mpi_is_gpu_aware")):
        text = f"no NCCL on {without.hosts} ({without[0]['own GPU']['nccl_missing']}), and MPI is not GPU-aware"
        fix = "pip install nvidia-nccl-cu13 (cu12); without it exchanges go through host memory"
        yield Problem(SLOW, "GPU", text, fix)
    if lacking := having.where("own GPU", lambda own: own["cudnn"] is None):
        from gpt2.kernels.cupy.cudnn_attention import INSTALL

        text = f"no cuDNN frontend on {lacking.hosts}: attention in bfloat16 uses our own, slower kernels"
        yield Problem(NOTE, "GPU", text, INSTALL)


def slowed(ranks, model):
    """Find GPUs whose power limit or clock is below their default."""
    for what, name, unit, command in (
        ("power limit", "power_w", "W", "nvidia-smi -pl {}"),
        ("clock", "clock_mhz", "MHz", "nvidia-smi -rac"),
    ):
        low = ranks.where("own GPU", lambda own, name=name: 0 < own.get(name, 0) < own.get(f"default_{name}", 0))
        if low:
            own = low[0]["own GPU"]
            default = own[f"default_{name}"]
            text = f"the {what} of the GPU of {low.names} is {own[name]} {unit}, by default {default}"
            yield Problem(SLOW, "GPU", text, f"{command.format(default)}, as root, or ask the site why")


CHECKS = (unused, occupied, libraries, slowed)
