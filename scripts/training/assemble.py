"""From the settings of a run to the parts that its training loop uses.

Only this file, and scripts/settings, read the settings of a training run, `s` in its functions. Each part is handed the
values that it needs, so what a part depends on stands in the call that makes it.
"""

from contextlib import closing
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path

from dist.gpu.topology import gpu_topology
from dist.looked_up import LookedUp
from dist.probe.links import clock_offset, probe_links
from dist.probe.ports import Ports
from dist.watch.watchdog import Watchdog
from dist.world import ClosedTogether, end_job_in_turn, library_name, threads_per_rank
from gpt2.config import flops_per_token
from gpt2.data import texts
from gpt2.data.windows import Windows
from gpt2.errors import UserError
from gpt2.formats.checkpoints import Checkpoint, model_facts
from gpt2.optimizer import LearningRateSchedule
from gpt2.parameters import Layout
from scripts.backends.choose import choose_backend
from scripts.machine.checkout import Checkout
from scripts.machine.launcher import job_end
from scripts.settings import derived
from scripts.settings.checks import complete
from scripts.settings.derived import adamw_settings, computing_ranks, global_batch, lasting, learning_rate, resolved
from scripts.settings.memory import check_memory
from scripts.settings.model_parallel import model_cut
from scripts.settings.sequence_length import trained_positions
from scripts.settings.split_embedding import new_lookup, settle_embedding
from scripts.training import start
from scripts.training.between_steps import ReplicaCheck, Samples, Validation
from scripts.training.checkpointing import Checkpointing
from scripts.training.data import open_data
from scripts.training.folder import RUNS, RunFolder, take_run_folder
from scripts.training.gpu_choices import GpuChoices
from scripts.training.meeting import MeetingPoint
from scripts.training.report import Ending, TraceFailures, blas_of_ranks, run_table, warn
from scripts.training.same_files import made_for_all
from scripts.training.shared_model import SharedModel
from scripts.training.signals import Clock, Signals
from scripts.training.step_records import ProgressLines, StepRecords
from scripts.training.utilization import Utilization, find_peak
from scripts.training.whole_model import WholeModel
from scripts.training.worker import Server, Worker
from strategies import Job, Strategy, find
from traces import Tracer
from traces.record.files import CounterFile
from traces.record.phases import EXCHANGE, PHASES
from traces.record.stream_times import GPU_PHASES


@dataclass(frozen=True)
class Parts:
    """What the training loop uses; every rank has its own.

    table           rank 0 prints it before the first step: all settings, and what they come to here
    steps           those that are left to make, counted from 1
    learning_rate   the schedule: learning_rate.at(step)
    worker          computes gradients from this rank's windows; a Server computes none
    strategy        turns the gradients of all ranks into updated parameters
    meeting_point   where all ranks hear at the end of a step what each of them has to say
    folder          rank 0's run folder, None on the others
    gpu_choices     keeps which algorithms GPUs compute with
    model           all parameters, for who looks at them between steps
    """

    table: str
    steps: range
    learning_rate: LearningRateSchedule
    tracer: Tracer
    worker: Worker | Server
    strategy: Strategy
    meeting_point: MeetingPoint
    records: StepRecords
    progress: ProgressLines
    folder: RunFolder | None
    validation: Validation
    replicas: ReplicaCheck
    samples: Samples
    gpu_choices: GpuChoices
    checkpoints: Checkpointing
    model: WholeModel
    ending: Ending


def assemble(settings, world, lock, resources: ClosedTogether) -> Parts | None:
    """Make the parts, each after those that it needs; None where no step is left to make. Collective. lock: a RunLock,
    behind which the run folder is read; nothing in the folder changes here. resources: closes what the run holds."""
    signals = resources.enter_context(closing(Signals(partial(end_job_in_turn, world.comm), lock.release)))
    clock, code = new_clock(settings, world), Checkout() if world.rank == 0 else None  # both go on meanwhile
    settings, config = completed(settings, world)
    shared = SharedModel(model_cut(settings, config), config, world, resources)
    mesh, layout, whole = shared.mesh, shared.layout, shared.whole
    links, threads = probe_links(world), settings.threads or threads_per_rank(world)
    s, new_backend, choice = decided(settings, config, world, shared, threads, links)
    path = take_run_folder(s.out, s.strategy, choice["auto"] is not None, s.resume, s.take_over, world, lock)
    train, val, data = data_of(s, config.vocab_size, world)  # behind the lock: a text's tokens lie beside the folder
    facts = run_facts(s, whole, data, world.size, lock.run) | shared.facts() | {"auto": choice["auto"]}
    checkpoint, steps = checkpoint_to_go_on_from(s, config, facts, links, world)
    if not steps:
        return None
    choice |= settle_embedding(s, layout, train, steps.start, facts, start.kept_facts(checkpoint, facts), choice, world)
    backend = resources.enter_context(closing(new_backend()))
    computes = computing_ranks(s, world.size)
    peak = find_peak(world, computes, s.peak_tflops, backend.kernels.device, choice.get("gpus"))
    parameters = start.first_parameters(s.init, s.seed, s.seq_len, backend, layout, checkpoint, world)
    used = resolved(s, config, threads, path)
    folder = new_folder(s, world, lock, path, used, steps, shared, threads, links, peak, choice, code)
    tracer, failures = new_tracer(s, world, shared, signals.has_sigterm, path / "traces", backend, resources)
    shared.meet_partners(backend, s.batch_size * s.seq_len, tracer)
    lookup = new_lookup(s, backend.buffers, layout) if facts["split_embedding"] else None
    strategy = backend.new_strategy(new_job(s, backend, shared, tracer, facts, lookup), steps.start - 1)
    if checkpoint:
        start.restore(checkpoint, strategy, layout, facts, world, mesh)
    strategy, worker = new_worker(s, world, backend, shared, strategy, train, val, tracer, lookup)
    model, cut = WholeModel(parameters, strategy.before_use, backend.fetch, mesh), shared.cut.text(mesh.data)
    checkpoints = new_checkpoints(s, world, mesh, path, strategy, layout, facts, steps, lock)
    return Parts(
        table=run_table(used, whole, cut, world, threads, choice, peak, facts["global_batch"], path, train, val),
        steps=steps,
        learning_rate=learning_rate(s),
        tracer=tracer,
        worker=worker,
        strategy=strategy,
        meeting_point=MeetingPoint(world.comm, worker, [signals, clock], checkpoints, failures, tracer, backend.device),
        records=new_records(s, shared, facts, Utilization(peak)),
        progress=ProgressLines(s.steps, world.print, world.places, shared.stages, s.log_every, job_end(), clock.left_s),
        folder=folder,
        validation=Validation(world.comm, tracer, worker, s.eval_every if val else 0, s.steps, s.eval_steps),
        replicas=ReplicaCheck(world, model, s.check_replicas, backend.buffers.fills_parameters, mesh),
        samples=Samples(world, tracer, model, backend, s.sample_every, s.tokenizer, threads, s.seed, s.seq_len),
        gpu_choices=GpuChoices(world, backend.kernels.device, checkpoint, steps.start),
        checkpoints=checkpoints,
        model=model,
        ending=Ending(world, folder, None if s.trace == "off" else path / "traces", tracer, failures),
    )


def completed(s, world) -> tuple:
    """complete(), and whether there is room for it."""
    with world.together(UserError):
        s, config = complete(s, world.size)
    if world.rank == 0 and (line := derived.doubtful_warmup(s)):
        warn(line)
    check_room(s, config, world)
    return s, config


def decided(settings, config, world, shared, threads: int, links: list[dict]) -> tuple:
    """choose_backend, of a run that goes on as it chose before; and what config.json says of BLAS. Collective.

    The settings have a backend, a transport and a strategy: nothing is "auto" any more.
    """
    kept = start.chosen_before(world, Path(settings.out) / "checkpoints") if settings.resume else None
    adamw, data_world = adamw_settings(settings), shared.mesh.data_world
    s, new_backend, choice = choose_backend(settings, config, data_world, shared.layout, adamw, threads, links, kept)
    choice |= blas_of_ranks(world)
    check_room(s, config, world)  # again: now it is known which arrays are in host memory
    return s, new_backend, choice


def check_room(s, config, world) -> None:
    with world.together(UserError):
        check_memory(s, config, world)


def data_of(s, vocab_size: int, world) -> tuple[Windows, Windows | None, dict]:
    """As open_data's. Rank 0 tokenizes a text if neither the user's cache folder nor the one beside the run folder has
    its tokens."""
    patterns = s.train_data, s.val_data
    if not s.train_data:
        prepare = partial(texts.prepare, s.text or None, s.tokenizer, splits=s.split_documents)
        patterns = made_for_all(world, prepare, (Path(s.out).parent if s.out else RUNS) / "tokens")
    return open_data(world, patterns, s.seq_len, s.shuffle, s.seed, global_batch(s, world.size), vocab_size)


def run_facts(s, layout: Layout, data: dict, ranks: int, run: str) -> dict:
    """What every checkpoint of this run says of it, whatever the step. run: the number of this start of it."""
    return {
        "run": run,
        "global_batch": global_batch(s, ranks), "seq_len": s.seq_len, "shuffle": s.shuffle, "seed": s.seed,
        "data": data, "ranks": ranks, "strategy": find(s.strategy).name, "wire": s.wire, **model_facts(layout),
        "settings": lasting(s, ranks),
    }  # fmt: skip


def checkpoint_to_go_on_from(s, config, facts: dict, links: list[dict], world) -> tuple[Checkpoint | None, range]:
    """The newest checkpoint of the run folder, if --resume asks for it and there is one; and the steps left to make.

    facts get what depends on the checkpoint: `bucket_bytes` and `trained_positions`.
    """
    checkpoint = start.find_and_check(world, Path(s.out), facts, s.typed, s.steps) if s.resume else None
    facts["bucket_bytes"] = start.bucket_size(links, checkpoint, facts) if s.overlap else None
    with world.together(UserError):
        before = checkpoint.facts if checkpoint else {}
        facts["trained_positions"] = trained_positions(s.init, config, s.seq_len, before)
    return checkpoint, range(checkpoint.step + 1 if checkpoint else 1, s.steps + 1)


def new_folder(s, world, lock, path, used, steps, shared, threads, links, peak, choice, code) -> RunFolder | None:
    """Rank 0's run folder, None on the other ranks. used: the settings as they are used."""
    folder, resumed_step = None, steps.start - 1 if s.resume else None
    with world.together(UserError):
        if world.rank == 0:
            folder = RunFolder(path, lock.check, resumed_step, s.tensorboard)
            facts = {
                "parameters": shared.whole.count, "threads_per_rank": threads, "links": links,
                "resumed_step": resumed_step, "peak": asdict(peak), "code": code.facts(),
            }  # fmt: skip
            if s.backend == "cupy":
                facts["gpu_topology"] = gpu_topology()  # of rank 0's node
            if shared.identity():
                facts["mesh"] = shared.mesh.coordinates
            folder.set_config(used, world.places, library_name(), facts | choice)
    return folder


def new_watchdog(s, world, shared, is_asked, traces: Path, resources: ClosedTogether) -> Watchdog | None:
    """What names a rank that the others wait for; None on one rank alone, or with --stall-after 0."""
    if not s.stall_after or world.size == 1:
        return None
    meetings, waits, titles = (*EXCHANGE, "wait"), (), ()
    if shared.identity():  # stages, and parts of unequal stages, meet unequally often: "wait" alone is all ranks'
        meetings, waits, titles = ("wait",), (*EXCHANGE, "recv"), shared.mesh.titles()
    watchdog = Watchdog(world, traces, PHASES, meetings, s.stall_after, s.end_on_stall, waits, titles, is_asked)
    return resources.enter_context(closing(watchdog))


def new_tracer(s, world, shared, is_asked, traces: Path, backend, resources) -> tuple[Tracer, TraceFailures]:
    """What times the phases, and tells the watchdog of each; and what tells of traces that cannot be written.

    If there are several nodes, the first rank of each node also samples the node's ports.
    """
    watchdog = new_watchdog(s, world, shared, is_asked, traces, resources)
    place = world.places[world.rank] | {"ranks": world.size, "strategy": s.strategy} | shared.identity()
    clock, counters, options = clock_offset(world), None, {"most_bytes": s.trace_mb * 1e6, "waits": True}
    if world.local_rank == 0 and world.node_count > 1 and s.trace != "off":
        ports = Ports()
        counters = CounterFile(traces, place, ports.names, clock, lambda: (*ports.read(), ports.stalls()))
    if s.backend == "cupy":
        # Over NCCL the exchange is queued on the GPU's stream too, so that is where its time is taken.
        on_stream = (*GPU_PHASES, *EXCHANGE) if s.transport == "nccl" else GPU_PHASES
        options |= {"device": backend.kernels.device, "on_stream": on_stream}
    tracer = Tracer(traces, place, s.trace, clock, counters, watchdog and watchdog.on_phase, **options)
    return tracer, TraceFailures(world, traces, tracer)


def new_job(s, backend, shared, tracer: Tracer, facts: dict, lookup: LookedUp | None) -> Job:
    """What the strategy works with."""
    return Job(
        world=backend.world,
        buffers=backend.buffers,
        new_optimizer=backend.new_optimizer,
        sum_of_squares=backend.sum_of_squares,
        max_norm=s.grad_clip,
        outlier_z=s.skip_outliers,
        over_model=shared.over_model(tracer),
        tracer=shared.group_tracer(tracer),
        server=s.server,
        final_ranges=tuple(part for part in shared.layout.final_ranges(lookup is not None) if part[0] < part[1]),
        bucket_bytes=facts["bucket_bytes"],
        lookup=lookup,
        all_reduced=Fraction(*facts.get("all_reduced", (0, 1))),
    )


def new_worker(s, world, backend, shared, strategy, train, val, tracer, lookup) -> tuple:
    """As SharedModel.new_worker's. Collective: where memory is short, all ranks end with one line."""
    with world.together(UserError):
        return shared.new_worker(backend, strategy, s.batch_size, s.seq_len, s.overlap, train, val, tracer, lookup)


def new_clock(s, world) -> Clock:
    return Clock(s.checkpoint_minutes, s.minutes) if world.rank == 0 else Clock(0, 0)


def new_records(s, shared, facts: dict, utilization) -> StepRecords:
    flops = flops_per_token(shared.whole.config, s.seq_len, shared.whole.count)
    return StepRecords(facts["global_batch"] * s.seq_len, flops, utilization, shared.stages)


def new_checkpoints(s, world, mesh, path: Path, strategy, layout: Layout, facts: dict, steps: range, lock):
    """What writes checkpoints: none where nothing is exchanged, as each rank trains a model of its own there."""
    every, keep = s.checkpoint_every if find(s.strategy).exchanges else None, (s.keep, s.keep_every)
    return Checkpointing(world, path / "checkpoints", strategy, layout, facts, steps, every, keep, lock.check, mesh)
