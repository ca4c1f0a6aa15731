"""Choose NumPy or CuPy, the GPU and the transport. If a choice is impossible, the job ends with a line of reason."""

import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

from dist.probe.links import rate_both_ways, segment_bytes
from dist.wire import WireFormat
from gpt2.errors import UserError
from gpt2.kernels import load_kernels
from scripts.backends.backends import CpuBackend, GpuBackend, StagedGpuBackend
from scripts.backends.gpus import check_sharing, gpu_identity, gpu_kernels, own_gpu, shared_gpus
from scripts.backends.step_timing import timed_training
from scripts.backends.transports import choose_transport, device_comm, find_transports, first_reason
from scripts.settings.checks import check_arrays
from scripts.settings.training import Settings
from strategies import Strategy, candidates, find, is_auto
from strategies.compatibility import operation_of


@dataclass(frozen=True)
class ChosenBackend:
    """settings: with backend, transport, strategy, overlap and op decided. make(): makes the backend; collective.
    facts: for config.json; "auto" holds the choice of --strategy auto."""

    settings: Settings
    make: Callable[[], object]
    facts: dict


def choose_backend(
    settings, config, world, layout, adamw, threads: int, links: list[dict], kept: dict | None = None
) -> ChosenBackend:
    """Choose the same backend on all ranks of the job. Collective over the job.

    world: the ranks that hold the same model shard. kept: "auto" from the checkpoint that the run resumes from. Nothing
    large stays allocated before the backend is made.
    """
    operation = operation_of(settings.wire, settings.op)
    wire_format = WireFormat(settings.wire, segment_bytes(rate_both_ways(links)), settings.error_feedback, operation)
    kernels, why = choose_kernels(settings.backend, layout, world.job, threads, settings.tf32)
    if kernels is None:
        return choose_numpy(settings, config, world, layout, adamw, threads, links, kept, wire_format, why)
    return choose_cupy(settings, config, world, layout, adamw, threads, links, kept, wire_format, kernels, why)


def choose_numpy(
    settings, config, world, layout, adamw, threads: int, links, kept, wire_format: WireFormat, why: str
) -> ChosenBackend:
    """Choose the strategy on CPU cores. Collective over the job."""
    settings = replace(settings, backend="numpy")
    with world.together(UserError):
        check_arrays(settings, f" ({why})")
        kernels = load_kernels("numpy", threads, dtype=settings.dtype)
    settings = replace(settings, transport="host")
    time_step = cache(partial(timed_training, world, settings, config, layout, adamw, kernels))
    settings, auto = with_strategy(settings, config, world, time_step, links, wire_format, kept)
    settings = with_operation(settings, wire_format.operation)
    make = partial(CpuBackend, settings, world, layout, adamw, wire_format, kernels)
    facts = {"backend_why": why, "products": kernels.device.how, "auto": auto}
    return ChosenBackend(settings, make, facts)


def choose_cupy(
    settings, config, world, layout, adamw, threads: int, links, kept, wire_format: WireFormat, kernels, why: str
) -> ChosenBackend:
    """Choose transport and strategy on GPUs. Collective over the job."""
    job = world.job
    settings = replace(settings, overlap=bool(settings.overlap))
    identities = job.comm.allgather(gpu_identity(own_gpu(job.local_rank)))
    shared = shared_gpus(job.places, identities)
    with world.together(UserError):
        check_sharing(shared, settings.share_gpus)
    found = find_transports(job, kernels.device, settings.transport, shared)
    with world.together(UserError):
        transport, transport_why = choose_transport(strategies_of(settings), settings, job.size, found)
    if settings.pipeline_parallel > 1 and transport != "host":
        transport_why += "; between stages through host memory"
    comm = device_comm(transport, world, kernels.device, settings.overlap)
    settings = replace(settings, backend="cupy", transport=transport)
    time_step = partial(timed_training, world, settings, config, layout, adamw, None)
    settings, auto = with_strategy(settings, config, world, time_step, links, wire_format, kept, comm)
    if comm is None:
        settings = with_operation(settings, wire_format.operation)
        make = partial(StagedGpuBackend, settings, world, layout, adamw, wire_format, kernels, threads)
    else:
        make = partial(GpuBackend, settings, world, layout, adamw, wire_format, kernels, comm)
    facts = {"backend_why": why, "transport_why": transport_why, "gpus": identities, "auto": auto}
    return ChosenBackend(settings, make, facts)


def strategies_of(settings) -> list[type[Strategy]]:
    """Return the strategy that the flags name, or all strategies that auto may choose between GPUs."""
    name = settings.strategy
    return [*candidates(name, "gpus").values()] if is_auto(name) else [find(name)]


def with_operation(settings, operation: str):
    """Return the settings with this `op` for MPI reductions in host memory, or op None if the strategy has none."""
    return replace(settings, op=operation if find(settings.strategy).traits.operations else None)


def with_strategy(settings, config, world, time_step, links: list[dict], wire_format: WireFormat, kept, comm=None):
    """Decide strategy and overlap. Return the settings, and auto's choice for checkpoints (None without auto).
    Collective.

    time_step(): returns a Training. kept: see choose_backend. comm: a DeviceComm between GPUs.
    """
    if not is_auto(settings.strategy):
        return settings, None
    begun = time.perf_counter()
    from scripts.backends import auto  # imports the benchmark, which only this function needs

    around = auto.surroundings(settings, world.job, links)
    choice = auto.kept_choice(kept, around, settings)
    if choice is None:
        if comm is None:
            forms = auto.forms_on_cores(settings, has_links=bool(links))
            forms = auto.fitting(forms, settings, config, world.job)
            choice = auto.choose_on_cores(world, forms, time_step(), links, wire_format)
        else:
            choice = auto.choose_on_gpus(world, settings, time_step().parameters, wire_format, comm)
    choice = world.job.comm.bcast(choice)  # groups of the job may have chosen differently: rank 0's choice counts
    said = {"strategy": choice.name, "overlap": choice.overlap, "why": choice.why, "around": around}
    said["took_s"] = time.perf_counter() - begun
    return replace(settings, strategy=choice.name, overlap=choice.overlap), said


def choose_kernels(backend: str, layout, world, threads: int, tf32: bool = False):
    """Return CuPy's kernels on this rank's GPU, or None for NumPy, and why. All ranks choose alike. Collective.

    layout: this rank's model shard.
    """
    if backend == "numpy":
        return None, "as asked for"
    kernels = None
    problem = None
    try:
        kernels = gpu_kernels(layout, own_gpu(world.local_rank), threads, tf32)
    except UserError as error:
        problem = error
    if backend == "cupy":
        with world.together(UserError):
            if problem is not None:
                raise problem
        return kernels, "as asked for"
    reason = first_reason(world, problem and str(problem))
    if reason is None:
        return kernels, "each rank has a GPU"
    if importlib.util.find_spec("cupy") is not None:  # without CuPy no GPU is expected
        world.print(f"--backend auto takes numpy: {reason}")
    return None, reason
