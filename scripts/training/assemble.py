"""Make the parts of the training loop from the plan of a run.

Only this file, plan.py, scripts/settings and scripts/backends read the settings of a training run. Each part gets the
values that it needs, so the call that makes a part shows its dependencies.
"""

from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial

from dist.gpu.topology import gpu_topology
from dist.probe.links import clock_offset
from dist.probe.ports import Ports
from dist.sparse_gradient import SparseGradient
from dist.watch.watchdog import Watchdog
from dist.world import ClosedTogether, end_job_in_turn, library_name
from gpt2.config import flops_per_token
from gpt2.errors import UserError
from gpt2.optimizer import Clipping, LearningRateSchedule
from scripts.machine.checkout import Checkout
from scripts.machine.host import job_end
from scripts.settings.derived import computing_ranks, learning_rate, outer_steps, resolved
from scripts.settings.split_embedding import new_lookup
from scripts.training import between_steps, start
from scripts.training.between_steps import MadeStep, Samples
from scripts.training.checkpointing import Checkpointing
from scripts.training.folder import RunFolder
from scripts.training.gpu_choices import GpuChoices
from scripts.training.meeting import MeetingPoint
from scripts.training.plan import Plan, plan_run
from scripts.training.report import TraceFailures, end_run, run_table
from scripts.training.signals import Clock, Signals
from scripts.training.step_records import Pace, ProgressLines, StepRecords
from scripts.training.utilization import find_peak
from scripts.training.whole_model import WholeModel
from scripts.training.worker import Server, Worker
from strategies import Job, Strategy, find
from traces import Tracer
from traces.record.files import CounterFile
from traces.record.phases import EXCHANGE, PHASES
from traces.record.stream_times import GPU_PHASES


@dataclass(frozen=True)
class LoopParts:
    """The parts of the training loop on one rank."""

    table: str  # what rank 0 prints before the first step: all settings, and facts that follow from them
    steps: range  # the steps left to make, counted from 1
    learning_rate: LearningRateSchedule
    tracer: Tracer
    worker: Worker | Server  # computes gradients from this rank's windows; a Server computes none
    strategy: Strategy  # turns the gradients of all ranks into updated parameters
    meeting_point: MeetingPoint  # where all ranks exchange their reports at the end of a step
    records: StepRecords
    hooks: list[Callable[[MadeStep], None]]  # called after each step, in this order
    checkpoints: Checkpointing
    model: WholeModel  # all parameters, for the hooks that read them between steps
    end_run: Callable[..., None]  # report.end_run, called after the last step


def assemble(settings, world, lock, resources: ClosedTogether) -> LoopParts | None:
    """Plan the run and build its parts in order of dependency; None if no step is left to make. Collective.

    lock: the RunLock of the run folder; the folder's content does not change here. resources: closes what was opened.
    """
    signals = resources.enter_context(closing(Signals(partial(end_job_in_turn, world.comm), lock.release)))
    # Only rank 0 has the clock of --minutes and --checkpoint-minutes.
    clock = Clock(settings.checkpoint_minutes, settings.minutes) if world.rank == 0 else Clock(0, 0)
    checkout = Checkout() if world.rank == 0 else None  # git runs in the background
    plan = plan_run(settings, world, lock, resources)
    if plan is None:
        return None
    settings = plan.settings
    shared = plan.shared
    backend = resources.enter_context(closing(plan.make_backend()))
    computes = computing_ranks(settings, world.size)
    peak = find_peak(world, computes, settings.peak_tflops, backend.kernels.device, plan.backend.get("gpus"))
    parameters = start.first_parameters(
        settings.init, settings.seed, settings.seq_len, backend, shared.layout, plan.checkpoint, world
    )
    used = resolved(settings, shared.whole.config, plan.threads, plan.folder)
    folder = new_folder(plan, world, lock, used, peak, checkout)
    tracer = new_tracer(plan, world, signals.has_sigterm, backend, resources)
    failures = TraceFailures(world, plan.traces, tracer)
    shared.meet_partners(backend, settings.batch_size * settings.seq_len, tracer)
    lookup = new_lookup(settings, backend.buffers, shared.layout) if plan.embedding.is_split else None
    strategy = backend.new_strategy(new_job(plan, backend, tracer, lookup), plan.steps.start - 1)
    if plan.checkpoint:
        start.restore(plan.checkpoint, strategy, shared.layout, plan.identity, world, shared.mesh)
    with world.together(UserError):  # activations may not fit into memory
        strategy, worker = shared.new_worker(
            backend, strategy, settings.batch_size, settings.seq_len, settings.overlap, plan.train, plan.val, tracer,
            lookup,
        )  # fmt: skip
    model = WholeModel(parameters, strategy.before_use, backend.fetch, shared.mesh, strategy.evaluated)
    checkpoints = new_checkpoints(plan, world, strategy, lock)
    flops = flops_per_token(shared.whole.config, settings.seq_len, shared.whole.count)
    pace = Pace(settings.steps, job_end(), clock.left_s)
    traces = None if settings.trace == "off" else plan.traces
    return LoopParts(
        table=run_table(used, plan, world, peak),
        steps=plan.steps,
        learning_rate=learning_rate(settings),
        tracer=tracer,
        worker=worker,
        strategy=strategy,
        meeting_point=MeetingPoint(world.comm, worker, [signals, clock], checkpoints, failures, tracer, backend.device),
        records=StepRecords(plan.global_batch * settings.seq_len, flops, peak, shared.stages),
        hooks=new_hooks(plan, world, backend, strategy.evaluated, worker, model, checkpoints, folder, tracer, pace),
        checkpoints=checkpoints,
        model=model,
        end_run=partial(end_run, world, folder, traces, tracer, failures),
    )


def new_hooks(
    plan: Plan, world, backend, evaluated, worker, model: WholeModel, checkpoints: Checkpointing, folder, tracer, pace
) -> list[Callable[[MadeStep], None]]:
    """Return the hooks of a step in order. Collective. evaluated: of the strategy. folder: rank 0's RunFolder."""
    settings = plan.settings
    mesh = plan.shared.mesh
    first_step = plan.steps.start
    eval_every = settings.eval_every if plan.val else 0
    validate = partial(
        between_steps.validate, world.comm, tracer, worker, eval_every, settings.steps, settings.eval_steps, evaluated
    )
    progress = ProgressLines(pace, world.print, world.places, plan.shared.stages, settings.log_every)
    holds = backend.buffers.fills_parameters
    gpu_choices = GpuChoices(world, backend.kernels.device, plan.checkpoint, first_step, checkpoints, folder)
    samples = Samples(
        world, tracer, model, backend, settings.sample_every, settings.tokenizer, plan.threads, settings.seed,
        settings.seq_len,
    )  # fmt: skip
    return [
        partial(between_steps.begin_folder, world, folder, tracer, first_step),
        validate,
        # The log comes before hooks that may end the run, so that it holds this step.
        partial(between_steps.log_step, folder, progress),
        partial(between_steps.end_if_diverged, world, checkpoints),
        partial(between_steps.check_replicas, world, model, settings.check_replicas, holds, mesh),
        gpu_choices.after,
        samples.after,
        partial(between_steps.begin_checkpoint, checkpoints, tracer),
    ]


def new_folder(plan: Plan, world, lock, used: dict, peak, checkout) -> RunFolder | None:
    """Return rank 0's run folder, None on the other ranks. used: from derived.resolved."""
    folder = None
    with world.together(UserError):
        if world.rank == 0:
            folder = RunFolder(plan.folder, lock.check, plan.resumed_step)
            facts = {"parameters": plan.shared.whole.count, "peak": asdict(peak), "code": checkout.facts()}
            if plan.settings.backend == "cupy":
                facts["gpu_topology"] = gpu_topology()  # on rank 0's node
            if plan.shared.identity():
                facts["mesh"] = plan.shared.mesh.coordinates
            folder.set_config(used, world.places, library_name(), facts | plan.config_facts())
    return folder


def new_watchdog(plan: Plan, world, is_asked, resources: ClosedTogether) -> Watchdog | None:
    """Return the Watchdog, which names a rank that others wait for; None on a single rank, or with --stall-after 0."""
    settings = plan.settings
    if not settings.stall_after or world.size == 1:
        return None
    meetings = (*EXCHANGE, "wait")
    waits = ()
    titles = ()
    if plan.shared.identity():  # stages exchange at different times; all ranks meet only in "wait"
        meetings = ("wait",)
        waits = (*EXCHANGE, "recv")
        titles = plan.shared.mesh.titles()
    watchdog = Watchdog(
        world, plan.traces, PHASES, meetings, settings.stall_after, settings.end_on_stall, waits, titles, is_asked
    )
    return resources.enter_context(closing(watchdog))


def new_tracer(plan: Plan, world, is_asked, backend, resources) -> Tracer:
    """Return the Tracer, which times the phases and tells the watchdog about them.

    If there are several nodes, the first rank of each node also samples the node's ports.
    """
    settings = plan.settings
    watchdog = new_watchdog(plan, world, is_asked, resources)
    place = world.places[world.rank] | {"ranks": world.size, "strategy": settings.strategy} | plan.shared.identity()
    clock = clock_offset(world)
    counters = None
    if world.local_rank == 0 and world.node_count > 1 and settings.trace != "off":
        ports = Ports()
        counters = CounterFile(plan.traces, place, ports.names, clock, lambda: (*ports.read(), ports.stalls()))
    options = {"most_bytes": settings.trace_mb * 1e6, "waits": True}
    if settings.backend == "cupy":
        # NCCL exchanges are also queued on the GPU's stream, so their time is measured there.
        on_stream = (*GPU_PHASES, *EXCHANGE) if settings.transport == "nccl" else GPU_PHASES
        options |= {"device": backend.kernels.device, "on_stream": on_stream}
    return Tracer(plan.traces, place, settings.trace, clock, counters, watchdog and watchdog.on_phase, **options)


def new_job(plan: Plan, backend, tracer: Tracer, lookup: SparseGradient | None) -> Job:
    """Return the strategy's Job. backend.new_strategy then replaces new_exchange and world.comm as --wire requires."""
    shared = plan.shared
    return Job(
        world=backend.world,
        buffers=backend.buffers,
        new_optimizer=backend.new_optimizer,
        sum_of_squares=backend.sum_of_squares,
        clipping=Clipping(plan.settings.grad_clip, plan.settings.skip_outliers, over_model=shared.over_model(tracer)),
        tracer=shared.group_tracer(tracer),
        server=plan.settings.server,
        final_ranges=tuple(part for part in shared.layout.final_ranges(lookup is not None) if part[0] < part[1]),
        bucket_bytes=plan.bucket_bytes,
        sparse=lookup,
        matrices=shared.layout.matrices,
        low_rank=plan.settings.low_rank,
        outer=outer_steps(plan.settings),
        steps_made=plan.steps.start - 1,
        count=shared.layout.count,
    )


def new_checkpoints(plan: Plan, world, strategy, lock) -> Checkpointing:
    """Return the Checkpointing. It writes nothing if the strategy exchanges nothing: each rank trains its own model."""
    settings = plan.settings
    every = settings.checkpoint_every if find(settings.strategy).traits.exchanges else None
    keep = settings.keep, settings.keep_every
    return Checkpointing(
        world, plan.folder / "checkpoints", strategy, plan.shared.layout, plan.checkpoint_facts(), plan.steps, every,
        keep, lock.check, plan.shared.mesh,
    )  # fmt: skip
