"""Findings about GPUs: whether CuPy can compute on them, who takes which, and what links them."""

from gpt2.kernels.cupy.device import OLDEST_CAPABILITY
from scripts.backends.gpus import shared_gpus
from scripts.checkup.findings import (  # fmt: skip
    FAIL,
    NOTE,
    SLOW,
    Finding,
    different,
    first_of_nodes,
    known,
    nodes,
    on_hosts,
    on_ranks,
    plural,
    rank_list,
)
from traces.units import bytes_text

FAR_LINKS = ("SYS", "NODE", "PHB")  # through the processor
USED_PART = 0.1


def unused(ranks, model):
    """GPUs that the driver lists and CuPy does not compute on."""
    lost = {}
    listed = {facts["place"]["node"] for facts, gpus in known(ranks, "GPUs", "listed") if gpus}
    for facts, own in known(ranks, "own GPU"):
        if facts["place"]["node"] in listed and own["count"] == 0 and not _is_older(own):
            lost.setdefault((own["cupy"] is None, own["problem"]), []).append(facts)
    for (missing, problem), some in lost.items():
        text = f"{on_hosts(some)} has GPUs, and CuPy finds none: {problem or 'none is visible'}"
        hidden = [shown for _, shown in known(some, "GPUs", "variables", "CUDA_VISIBLE_DEVICES")]
        fix = "pip install -e '.[gpu-cuda13]' (gpu-cuda12 for a driver of CUDA 12)"
        if not missing:
            shown = f"CUDA_VISIBLE_DEVICES is {hidden[0]!r}: " if hidden else ""
            fix = f"{shown}ask for GPUs (srun --gpus-per-task=1, or --gres=gpu:N), and check nvidia-smi there"
        yield Finding(SLOW if missing else FAIL, "GPU", text, fix)


def shared(ranks, model):
    pairs = known(ranks, "own GPU", "id")
    for host, sharers in shared_gpus([facts["place"] for facts, _ in pairs], [{"id": id} for _, id in pairs]):
        text = f"ranks {rank_list(sharers)} have one GPU on {host}"
        fix = "start as many ranks a node as it has GPUs (srun --ntasks-per-node, --gpus-per-task=1), or --share-gpus"
        yield Finding(FAIL, "GPU", text, fix)


def idle(ranks, model):
    some = []
    for members in nodes(ranks).values():
        taken = {identity for _, identity in known(members, "own GPU", "id")}
        count = len(members[0].get("GPUs", {}).get("listed", []))
        if taken and len(taken) < count and len(known(members, "own GPU")) == len(members):
            some.append((members[0], len(taken), count))
    if not some:
        return
    _, taken, count = some[0]
    text = f"{taken} of {plural(count, 'GPU')} on {on_hosts([facts for facts, *_ in some])} have a rank"
    yield Finding(NOTE, "GPU", text, f"start {count} ranks a node to use all")


def driver_too_old(ranks, model):
    old = [facts for facts, own in known(ranks, "own GPU") if _is_older(own)]
    if not old:
        return
    own = old[0]["own GPU"]
    text = (
        f"the driver on {on_hosts(old)} is of CUDA {own['driver_cuda'] // 1000}, and CuPy of CUDA "
        f"{own['runtime_cuda'] // 1000}: kernels do not load"
    )
    fix = f"pip install -e '.[gpu-cuda{own['driver_cuda'] // 1000}]' in place of that CuPy, or a newer driver"
    yield Finding(FAIL, "GPU", text, fix)


def _is_older(own: dict) -> bool:
    """Whether there is a driver (its version is 0 else), and its CUDA's major version is below CuPy's."""
    return 0 < own.get("driver_cuda", 0) // 1000 < own["runtime_cuda"] // 1000


def too_old(ranks, model):
    old = [facts for facts, capability in known(ranks, "own GPU", "capability") if capability < OLDEST_CAPABILITY]
    if not old:
        return
    text = f"the GPU of {on_ranks(old)} is a {old[0]['own GPU']['name']}: bfloat16 and asynchronous copies came later"
    yield Finding(FAIL, "GPU", text, "use GPUs from Ampere on (A100), or --backend numpy")


def used_by_others(ranks, model):
    used = [
        facts for facts, total in known(ranks, "own GPU", "total") if facts["own GPU"]["free"] < (1 - USED_PART) * total
    ]
    if not used:
        return
    taken = max(facts["own GPU"]["total"] - facts["own GPU"]["free"] for facts in used)
    text = f"{bytes_text(taken)} of the GPU of {on_ranks(used)} are in use before training begins"
    yield Finding(SLOW, "GPU", text, "see who computes there: nvidia-smi")


def transport(ranks, model):
    """Several GPUs, and neither NCCL nor an MPI that takes their arrays."""
    with_gpu = [facts for facts, _ in known(ranks, "own GPU", "id")]
    without = [facts for facts in with_gpu if facts["own GPU"]["nccl"] is None]
    aware = all(facts.get("GPU-aware MPI", {}).get("aware") for facts in with_gpu)
    if len(with_gpu) < 2 or not without or aware:
        return
    text = f"no NCCL on {on_hosts(without)} ({without[0]['own GPU']['nccl_missing']}), and MPI is not GPU-aware"
    fix = "pip install nvidia-nccl-cu13 (cu12); without it exchanges go through host memory"
    yield Finding(SLOW, "GPU", text, fix)


def differences(ranks, model):
    fix = "ask for one kind of node (SLURM: --constraint); steps go at the slowest GPU's pace"
    for name, path in (("the driver", ("GPUs", "driver")), ("the GPU", ("own GPU", "name"))):
        if text := different(known(ranks, *path)):
            yield Finding(NOTE, "GPU", f"{name} differs between nodes: {text}", fix)


def far_links(ranks, model):
    """GPUs of one node that reach each other through the processor."""
    far = []
    for facts, topology in known(first_of_nodes(ranks), "GPUs", "topology"):
        kinds = {kind for links in topology["links"].values() for other, kind in links.items() if other[:3] == "GPU"}
        if worst := next((kind for kind in FAR_LINKS if kind in kinds), None):
            far.append((facts, worst))
    if not far:
        return
    text = f"GPUs on {on_hosts([facts for facts, _ in far])} are linked through the processor ({far[0][1]})"
    yield Finding(NOTE, "GPU", text, "expect less than NVLink's rate between the GPUs of a node")


CHECKS = (
    unused, shared, idle, driver_too_old, too_old, used_by_others, transport, differences, far_links,
)  # fmt: skip
