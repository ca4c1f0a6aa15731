"""--transport: choose the transport of the exchange between GPUs, and say why."""

from dataclasses import dataclass

from dist.gpu.comm import AloneComm
from dist.gpu.gpu_aware import GpuAwareComm, is_proven, says_gpu_aware
from dist.gpu.nccl import NcclComm, missing_nccl
from dist.probe.links import bucket_bytes
from dist.world import World
from gpt2.errors import UserError
from scripts.settings.model_parallel import is_cut
from strategies.base import Strategy
from strategies.compatibility import check_transport, device_transports, no_overlap, overlapping, overlaps_over_nccl

ALONE = "alone"  # one rank, nothing to exchange
# Between GPUs the same as in PyTorch's DDP: large enough for the full rate, small enough to begin early.
DEVICE_BUCKET_BYTES = 25 << 20


@dataclass(frozen=True)
class Obstacles:
    """Why a transport is not available on all ranks, or None. shared: (host, ranks) of GPUs that several ranks have."""

    no_nccl: str | None
    no_gpu_aware: str | None
    shared: list


def find_transports(world: World, device, requested: str, shared: list) -> Obstacles:
    """Find the transports that all ranks have. GPU-aware MPI is tried only if it may be used. Collective."""
    no_nccl = first_reason(world, missing_nccl())
    if no_nccl is None and shared:
        no_nccl = "NCCL needs a GPU for each rank"
    aware, source = says_gpu_aware()
    no_gpu_aware = first_reason(world, None if aware else f"this MPI says it is not GPU-aware ({source})")
    wanted = requested == "gpu-aware" or (requested == "auto" and no_nccl is not None and world.size > 1)
    if no_gpu_aware is None and wanted and not is_proven(world.comm, device):
        no_gpu_aware = f"this MPI says it is GPU-aware ({source}), but a sum of arrays on GPUs comes out wrong"
    return Obstacles(no_nccl, no_gpu_aware, shared)


def choose_transport(kinds: list[type[Strategy]], settings, ranks: int, found: Obstacles) -> tuple[str, str]:
    """Return the transport (host, gpu-aware, nccl or alone) and why, for the strategy of `kinds` with most transports.

    ranks: the job's number of ranks. Raise UserError if the requested transport is not available.
    """
    requested = settings.transport
    flags = (settings.wire, settings.overlap, settings.op)
    kind = max(kinds, key=lambda kind: (len(device_transports(kind, *flags)), kind.traits.overlaps))
    check_transport(kind, requested, *flags)
    if requested == "nccl" and found.no_nccl:
        advice = "start a rank for each GPU" if found.shared else "pip install nvidia-nccl-cu13 (-cu12 for CUDA 12)"
        raise UserError(f"--transport nccl: {found.no_nccl}: {advice}, or use --transport host")
    if requested == "gpu-aware" and found.no_gpu_aware:
        raise UserError(f"--transport gpu-aware: {found.no_gpu_aware}: load one that is, or use --transport host")
    if settings.overlap and is_cut(settings) and (requested == "nccl" or not kind.traits.overlaps):
        raise UserError(
            f"--overlap with --strategy {kind.name} over NCCL, where ranks share a model: sums over its shards and "
            "exchanges on two streams may wait for each other: leave --overlap out, or use --transport host and one of "
            f"{overlapping()}"
        )
    if requested != "auto":
        return requested, "as asked for"
    if settings.overlap and is_cut(settings):
        return "host", "--overlap works there while ranks share a model"
    possible = device_transports(kind, *flags)
    if not possible:
        adds = "--op own adds in host memory" if settings.op == "own" else None
        adds = "--wire int8 adds in host memory" if settings.wire == "int8" else adds
        return "host", adds or f"{kind.name} does not declare how it exchanges between GPUs"
    if ranks == 1 or not (kind.traits.exchanges or is_cut(settings)):
        return ALONE, "nothing is exchanged"
    if found.no_nccl is None:
        return "nccl", "NCCL is available, and each rank has its own GPU"
    if found.no_gpu_aware is None and "gpu-aware" in possible:
        return "gpu-aware", f"{found.no_nccl}; this MPI takes arrays on GPUs (checked)"
    if settings.overlap and overlaps_over_nccl(kind):
        raise no_overlap(kind, f"({found.no_nccl})")
    return "host", f"{found.no_nccl}; {found.no_gpu_aware or 'this MPI exchanges nothing while the GPU computes'}"


def device_comm(transport: str, world: World, device, overlap: bool):
    """Return the communicator for arrays on the GPU, None if they are exchanged through host memory. Collective.

    With overlap the communicator has its own stream, to exchange while the device computes.
    """
    kinds = {"nccl": NcclComm, "gpu-aware": GpuAwareComm, ALONE: AloneComm}
    if transport not in kinds:
        return None
    stream = device.cupy.cuda.Stream(non_blocking=True) if overlap else device.stream
    return kinds[transport](world.comm, device, stream, world.local_comm)


def bucket_size(transport: str, links: list[dict]) -> int:
    """Return how many bytes --overlap exchanges at once. links: measured between the nodes."""
    return bucket_bytes(links) if transport == "host" else DEVICE_BUCKET_BYTES


def first_reason(world: World, reason: str | None) -> str | None:
    """Return on all ranks the first reason that any rank gives. Collective."""
    return next((each for each in world.comm.allgather(reason) if each is not None), None)
